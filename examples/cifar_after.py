"""Train a small residual network on CIFAR-10.

The data are CIFAR-10's binary files (https://www.cs.toronto.edu/~kriz/cifar.html), unpacked.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rex_ray import launch, session
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Cifar10(Dataset):
    def __init__(self, files, transform):
        records = np.concatenate([np.fromfile(file, np.uint8).reshape(-1, 3073) for file in files])
        self.labels = torch.from_numpy(records[:, 0].astype(np.int64))
        self.images = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy())
        self.transform = transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


class Block(nn.Module):
    def __init__(self, channels_in, channels, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, inputs):
        outputs = F.relu(self.norm1(self.conv1(inputs)))
        return F.relu(self.norm2(self.conv2(outputs)) + self.shortcut(inputs))


def make_model(width):
    return nn.Sequential(
        Block(3, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def load_data(args):
    scale = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    augment = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip(), *scale])
    train_set = Cifar10(sorted(args.data_dir.glob("data_batch_*.bin")), augment)
    test_set = Cifar10([args.data_dir / "test_batch.bin"], v2.Compose(scale))
    options = {"num_workers": args.loader_processes, "pin_memory": torch.cuda.is_available()}
    loader = DataLoader(train_set, args.batch_size, shuffle=True, **options)
    return loader, DataLoader(test_set, args.batch_size, **options)


def train(model, loader, optimizer, device):
    model.train()
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    loss, correct, count = 0.0, 0, 0
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        outputs = model(images)
        loss += F.cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(1) == labels).sum().item()
        count += len(labels)
    return loss, correct, count


def main(args):
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader, test_loader = load_data(args)
    model = make_model(args.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    model, optimizer, scheduler, loader, test_loader = session.prepare(model, optimizer, scheduler, loader, test_loader)
    for epoch in session.epochs(args.epochs):
        train(model, loader, optimizer, device)
        scheduler.step()
        loss, correct, count = evaluate(model, test_loader, device)
        session.report({"loss": session.pool(loss, count), "accuracy": session.pool(correct, count)})


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=lambda path: Path(path).absolute(), default="cifar-10-batches-bin")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=64, help="channels of the first block")
    parser.add_argument("--loader-processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    launch(main, args, num_workers=2, global_batch_size=args.batch_size, use_gpu=torch.cuda.is_available())
