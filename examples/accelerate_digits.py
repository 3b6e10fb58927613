"""A loop written for Hugging Face Accelerate, on two workers: ``RexAccelerator`` is the only change inside it."""

import torch
import torch.nn.functional as F
from rex_ray import launch, session
from rex_ray.integrations.accelerate import RexAccelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def digits():
    images, labels = load_digits(return_X_y=True)
    rows = TensorDataset(torch.from_numpy(images).float() / 16, torch.from_numpy(labels))
    return torch.utils.data.random_split(rows, [1500, 297], torch.Generator().manual_seed(0))


def main(num_epochs):
    accelerator = RexAccelerator()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    train_set, test_set = digits()
    loader, test_loader = DataLoader(train_set, 64, shuffle=True), DataLoader(test_set, 64)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=num_epochs * len(loader))
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )
    for epoch in session.epochs(num_epochs):
        model.train()
        for images, labels in loader:
            accelerator.backward(F.cross_entropy(model(images), labels))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        correct = []
        for images, labels in test_loader:
            with torch.no_grad():
                outputs = model(images)
            correct.append(accelerator.gather_for_metrics(outputs.argmax(1) == labels))
        accuracy = torch.cat(correct).float().mean().item()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.4f}")
        session.report({"accuracy": accuracy})


if __name__ == "__main__":
    launch(main, 3, num_workers=2, global_batch_size=64)
