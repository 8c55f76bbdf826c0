"""What each format below 16 bits loses, as the table of docs/FORMATS.md.

python scripts/formats.py
"""

from __future__ import annotations

import math

import torch

from amp_core.lowp.formats import E2M1, E3M2, E4M3, E5M2, Scaling, quantise

FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "E4M3, scale of a tensor": Scaling(E4M3, (None, None)),
    "E4M3, of a row": Scaling(E4M3, (1, None)),
    "E4M3, of 1 x 128": Scaling(E4M3, (1, 128)),
    "E4M3, of 128 x 128": Scaling(E4M3, (128, 128)),
    "E5M2, of a tensor": Scaling(E5M2, (None, None)),
    "mxfp8 (E4M3)": Scaling(E4M3, (1, 32), "e8m0"),
    "mxfp8, `floor`": Scaling(E4M3, (1, 32), "e8m0", "floor"),
    "mxfp6 (E3M2)": Scaling(E3M2, (1, 32), "e8m0"),
    "mxfp4 (E2M1)": Scaling(E2M1, (1, 32), "e8m0"),
    "nvfp4": Scaling(E2M1, (1, 16), "nvfp4"),
    "nvfp4, 16 x 16": Scaling(E2M1, (16, 16), "nvfp4"),
}


def bits(how: torch.dtype | Scaling, size: int) -> float:
    """Of an element and its part of the scale."""
    if isinstance(how, torch.dtype):
        return 8.0 * how.itemsize
    shared = math.prod(size if side is None else side for side in how.block)
    return 1 + how.element.exponent + how.element.mantissa + {"fp32": 32, "e8m0": 8, "nvfp4": 8}[how.scale] / shared


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    x = torch.randn(4096, 256)
    outlier = x.clone()
    outlier[0, 0] = 1e4 * x.abs().max()
    print("| format | bits | error | largest off by over 1/16 | zeros beside an outlier |")
    print("| --- | --- | --- | --- | --- |")
    for name, how in FORMATS.items():
        if isinstance(how, torch.dtype):
            low, beside = x.to(how).float(), outlier.to(how).float()
        else:
            low, beside = quantise(x, how).dense(), quantise(outlier, how).dense()
        error = float((low - x).norm() / x.norm())
        peaks, theirs = x.view(-1, 32).abs().amax(1), low.view(-1, 32).abs().amax(1)
        off = ((theirs - peaks).abs() / peaks > 1 / 16).float().mean().item()
        zeros = (beside == 0).float().mean().item()
        print(f"| {name} | {bits(how, 256):.3g} | {error:.4f} | {off:.1%} | {zeros:.1%} |".replace("%", " %"))


if __name__ == "__main__":
    main()
