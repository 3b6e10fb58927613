"""Two small language models, an LSTM and a transformer, and what they are judged by.

Both see each row alone, without memory of the row before.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

__all__ = ["LSTMModel", "TransformerModel", "perplexity"]

_INIT_RANGE = 0.1


class LSTMModel(nn.Module):
    """An LSTM whose output weights are its input embedding (Press and Wolf 2017, arXiv:1608.05859).

    Args:
        num_words: size of the vocabulary.
        width: of embedding and state.
        num_layers: LSTMs on top of one another.
        dropout: share of values dropped between layers while training.
    """

    def __init__(self, num_words: int, *, width: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, width)
        self.dropout = nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, num_layers, batch_first=True, dropout=dropout if num_layers > 1 else 0.0)
        self.decoder = _tied_decoder(self.embedding)

    def forward(self, words: Tensor) -> Tensor:
        """Return one score per word of the vocabulary at every place.

        Args:
            words: numbers of words, shape ``[rows, length]``.

        Returns:
            Shape ``[rows, length, num_words]``.
        """
        states, _ = self.lstm(self.dropout(self.embedding(words)))
        scores: Tensor = self.decoder(self.dropout(states))
        return scores


class TransformerModel(nn.Module):
    """A decoder-only transformer, normalised before each part (Vaswani et al. 2017, Xiong et al. 2020).

    Args:
        num_words: size of the vocabulary.
        width: of embedding and layers, even, a multiple of ``num_heads``.
        num_layers: blocks.
        num_heads: heads of attention in each.
        dropout: share of values dropped while training.
    """

    def __init__(self, num_words: int, *, width: int, num_layers: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, width)
        self.dropout = nn.Dropout(dropout)
        block = nn.TransformerEncoderLayer(
            width, num_heads, dim_feedforward=4 * width, dropout=dropout, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.decoder = _tied_decoder(self.embedding)

    def forward(self, words: Tensor) -> Tensor:
        """Return one score per word of the vocabulary at every place; arguments and shape as ``LSTMModel``'s."""
        width, length = self.embedding.embedding_dim, words.shape[1]
        inputs = self.embedding(words) * math.sqrt(width) + _positions(length, width, words.device)
        later = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        scores: Tensor = self.decoder(self.blocks(self.dropout(inputs), mask=later, is_causal=True))
        return scores


def _tied_decoder(embedding: nn.Embedding) -> nn.Linear:
    decoder = nn.Linear(embedding.embedding_dim, embedding.num_embeddings)
    nn.init.uniform_(embedding.weight, -_INIT_RANGE, _INIT_RANGE)
    nn.init.zeros_(decoder.bias)
    decoder.weight = embedding.weight
    return decoder


def _positions(length: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines of the place, shape ``[length, width]``."""
    place = torch.arange(length, device=device).unsqueeze(1)
    rates = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000.0) / width))
    return torch.stack((torch.sin(place * rates), torch.cos(place * rates)), dim=2).flatten(1)


def perplexity(nats_per_word: float) -> float:
    """Return the perplexity of a mean cross-entropy, infinite where training came apart.

    Of the mean over all words: a mean of ranks' perplexities would depend on how the rows were shared.
    """
    try:
        return math.exp(nats_per_word)
    except OverflowError:
        return math.inf
