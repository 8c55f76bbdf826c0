"""Verification of embeddings on unseen identities: pairs of images, same or different.

The protocol is that of Labeled Faces in the Wild (Huang et al. 2007): the cosine threshold is chosen on nine tenths of
the pairs and evaluated on the last. True accept rates at a false accept rate are those of IJB-A (Klare et al. 2015).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from amp_core.tensors import widest

RATES = ("1e-2", "1e-3", "1e-4")
_FOLDS = 10
_MOST_SAME, _MOST_DIFFERENT = 20_000, 200_000
_CHUNK = 4096


def verify(embeddings: Tensor, labels: Tensor, *, scale: float) -> dict[str, float]:
    """Metrics of embeddings. Deterministic: the same pairs each time. Syncs with the device.

    Args:
        embeddings: float32 [N, D], need not be normalised.
        labels: int64 [N]. Some identities must have two images or more.
        scale: of the cosines in the loss.

    Returns:
        accuracy: ten-fold accuracy of "same or different?" over equally many pairs of each. tar_at_far_1e-2, ...: share
            of same pairs accepted where at most that share of different ones is. Omitted if there are too few pairs.
        loss: mean cross-entropy of an image among the mean embeddings of all identities, its own mean without it.
        rank1: share of images nearest to their own identity's mean. A non-finite embedding counts as the zero vector.
    """
    embeddings = F.normalize(torch.nan_to_num(embeddings.float(), nan=0.0, posinf=0.0, neginf=0.0))
    loss, rank1 = _identify(embeddings, labels, scale)
    same, different = choose_pairs(labels.cpu().numpy())
    accepted, refused = _cosines(embeddings, same), _cosines(embeddings, different)
    metrics = {"loss": loss, "accuracy": _accuracy(accepted, refused), "rank1": rank1}
    ordered = np.sort(refused)[::-1]
    for rate in RATES:
        allowed = int(float(rate) * len(ordered))
        if allowed:
            # At most `allowed` of the different pairs have a cosine above that of the next one.
            metrics[f"tar_at_far_{rate}"] = float((accepted > ordered[allowed]).mean())
    return metrics


def choose_pairs(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of images of the same and of different identities: int64 [P, 2] and [Q, 2], in random order, unique.

    All same pairs, up to 20,000; and up to 200,000 different ones. ValueError: one kind is empty.
    """
    rng = np.random.default_rng(0)
    order = np.argsort(labels, kind="stable")
    _, first, counts = np.unique(labels[order], return_index=True, return_counts=True)
    beyond = np.cumsum(counts * (counts - 1) // 2)
    if len(counts) < 2 or beyond[-1] == 0:
        raise ValueError("verification needs two identities, one of them with two images")
    numbers = rng.permutation(beyond[-1])[:_MOST_SAME]
    identity = np.searchsorted(beyond, numbers, side="right")
    # Pair k of an identity is (low, high), high > low, with k = high (high - 1) / 2 + low.
    k = numbers - np.concatenate([[0], beyond])[identity]
    high = ((1 + np.sqrt(8 * k + 1)) / 2).astype(np.int64)
    low = k - high * (high - 1) // 2
    same = order[first[identity][:, None] + np.stack([low, high], axis=1)]

    drawn = np.sort(rng.integers(0, len(labels), (2 * _MOST_DIFFERENT, 2)), axis=1)
    drawn = drawn[labels[drawn[:, 0]] != labels[drawn[:, 1]]]
    # As one number each: rows of a table take ten times as long to sort.
    different = np.stack(np.divmod(np.unique(drawn[:, 0] * len(labels) + drawn[:, 1]), len(labels)), axis=1)
    return same, rng.permutation(different)[:_MOST_DIFFERENT]


def _cosines(embeddings: Tensor, pairs: NDArray[np.int64]) -> NDArray[np.float32]:
    parts = torch.from_numpy(pairs).to(embeddings.device).split(_CHUNK)
    return torch.cat([(embeddings[part[:, 0]] * embeddings[part[:, 1]]).sum(1) for part in parts]).cpu().numpy()


def _accuracy(same: NDArray[np.float32], different: NDArray[np.float32]) -> float:
    num = min(len(same), len(different))
    right = 0
    folds = np.arange(num) % min(_FOLDS, num)
    for fold in np.unique(folds):
        held_out = folds == fold
        rest = ~held_out if num > 1 else held_out
        threshold = _best_threshold(same[:num][rest], different[:num][rest])
        right += (same[:num][held_out] > threshold).sum() + (different[:num][held_out] <= threshold).sum()
    return float(right) / (2 * num)


def _best_threshold(same: NDArray[np.float32], different: NDArray[np.float32]) -> np.float32:
    """The cosine threshold with the most correct answers: same pairs above, different pairs at or below it."""
    values = np.unique(np.concatenate([same, different]))
    accepted = len(same) - np.searchsorted(np.sort(same), values, side="right")
    refused = np.searchsorted(np.sort(different), values, side="right")
    return values[np.argmax(accepted + refused)]


def _identify(embeddings: Tensor, labels: Tensor, scale: float) -> tuple[float, float]:
    names, labels = labels.unique(return_inverse=True)
    counts = labels.bincount(minlength=len(names))
    sums = embeddings.new_zeros(len(names), embeddings.shape[1]).index_add_(0, labels, embeddings)
    means = F.normalize(sums)
    losses, right = [], []
    for vectors, own in zip(embeddings.split(_CHUNK), labels.split(_CHUNK), strict=True):
        logits = vectors @ means.T
        without = (F.normalize(sums[own] - vectors) * vectors).sum(1, keepdim=True)
        logits.scatter_(1, own[:, None], without)
        losses.append(F.cross_entropy(logits * scale, own, reduction="none"))
        right.append(logits.argmax(1) == own)
    counted = counts[labels] > 1
    loss, hits = torch.cat(losses)[counted], torch.cat(right)[counted]
    return loss.mean().item(), hits.to(widest(hits.device)).mean().item()
