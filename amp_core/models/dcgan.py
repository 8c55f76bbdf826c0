"""Generator and discriminator of images: strided convolutions (Radford et al., arXiv:1511.06434), small.

The discriminator has no BatchNorm: a penalty on each sample's gradient is meaningless if its score depends on the rest
of the batch (Gulrajani et al., arXiv:1704.00028).
"""

from __future__ import annotations

from torch import Tensor, nn

from amp_core.models.family import Family, ImageShape, check_choice, check_count


class Generator(nn.Module):
    """Images [B, C, H, W], of any range, from noise [B, latent]."""

    def __init__(self, image_shape: ImageShape, width: int, latent: int, norm: str) -> None:
        super().__init__()
        self.latent, self.size = latent, image_shape[1:]
        num_doublings = _num_halvings(image_shape)
        channels = width * 2 ** (num_doublings - 1)
        start = [-(-side // 2**num_doublings) for side in self.size]

        def normalise(channels: int) -> nn.Module:
            return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(max(1, channels // 4), channels)

        layers: list[nn.Module] = [nn.Linear(latent, channels * start[0] * start[1])]
        layers += [nn.Unflatten(1, (channels, *start)), normalise(channels), nn.ReLU()]
        for _ in range(num_doublings - 1):
            layers += [nn.ConvTranspose2d(channels, channels // 2, 4, 2, 1), normalise(channels // 2), nn.ReLU()]
            channels //= 2
        self.layers = nn.Sequential(*layers, nn.ConvTranspose2d(channels, image_shape[0], 4, 2, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z)[..., : self.size[0], : self.size[1]]


def dcgan(*, image_shape: ImageShape, width: int = 16, latent: int = 64, norm: str = "group") -> nn.Module:
    """A ModuleDict of `generator`, noise [B, latent] -> images [B, C, H, W], and `discriminator`, images -> scores [B].

    The generator's last layer is linear, so that images may have any range.

    Args:
        width: channels at the finest resolution, doubled with each halving of it. Multiples of 8 suit Tensor Cores.
        latent: size of the noise vector.
        norm: the generator's normalisation: group, or batch, whose statistics are per micro-batch.
    """
    check_count("width", width)
    check_count("latent", latent)
    check_choice("norm", norm, ("group", "batch"))
    if min(image_shape[1:]) < 4:
        raise ValueError(f"images of {image_shape[1]}x{image_shape[2]} pixels, expected at least 4x4")
    channels, layers = image_shape[0], []
    sides = list(image_shape[1:])
    for i in range(_num_halvings(image_shape) + 1):
        layers += [nn.Conv2d(channels, width * 2**i, 4, 2, 1), nn.LeakyReLU(0.2)]
        channels, sides = width * 2**i, [side // 2 for side in sides]
    layers += [nn.Flatten(), nn.Linear(channels * sides[0] * sides[1], 1), nn.Flatten(0)]
    return nn.ModuleDict(
        {"generator": Generator(image_shape, width, latent, norm), "discriminator": nn.Sequential(*layers)}
    )


def _num_halvings(image_shape: ImageShape) -> int:
    """How often the shorter side is halved until 7 or fewer pixels are left, at least once."""
    shorter, num = min(image_shape[1:]), 1
    while -(-shorter // 2**num) > 7:
        num += 1
    return num


GANS = Family(
    what="a generator with its discriminator",
    builders={"dcgan": dcgan},
    example={"image_shape": (3, 64, 64)},
)
