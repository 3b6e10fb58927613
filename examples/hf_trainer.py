"""Hugging Face's Trainer on two workers: a tiny language model from its configuration, on rows of unequal length."""

import torch
from rex_ray import launch
from rex_ray.integrations.huggingface import RexTrainerMixin
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY, LENGTH = 32, 12


class MixedTrainer(RexTrainerMixin, Trainer):
    pass


class Counting(Dataset):
    """Each row counts up from somewhere, for a while."""

    def __init__(self, num_rows):
        draw = torch.Generator().manual_seed(0)
        self.first = torch.randint(0, VOCABULARY, (num_rows,), generator=draw)
        self.lengths = torch.randint(3, LENGTH + 1, (num_rows,), generator=draw)

    def __len__(self):
        return len(self.first)

    def __getitem__(self, row):
        places = torch.arange(LENGTH)
        ids = (self.first[row] + places) % VOCABULARY
        return {"input_ids": ids, "labels": ids.masked_fill(places >= self.lengths[row], -100)}


def main(num_epochs):
    torch.manual_seed(0)
    sizes = {"n_positions": LENGTH, "n_embd": 32, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes))
    args = TrainingArguments(
        "trainer",
        num_train_epochs=num_epochs,
        per_device_train_batch_size=16,  # for the Trainer's own log: the rows of a step are global_batch_size
        learning_rate=1e-2,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="no",  # the session saves
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = MixedTrainer(model=model, args=args, train_dataset=Counting(320), eval_dataset=Counting(64))
    return trainer.train().training_loss


if __name__ == "__main__":
    launch(main, 3, num_workers=2, global_batch_size=32, weight_by="tokens")
