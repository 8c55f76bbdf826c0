"""Networks by name, in families."""

from amp_core.models.dcgan import GANS
from amp_core.models.family import Family, build_model, check_model
from amp_core.models.gpt import LANGUAGE_MODELS
from amp_core.models.images import CLASSIFIERS
from amp_core.models.iresnet import EMBEDDERS
from amp_core.models.unet import SEGMENTERS

__all__ = ["CLASSIFIERS", "EMBEDDERS", "GANS", "LANGUAGE_MODELS", "SEGMENTERS", "Family", "build_model", "check_model"]
