"""Checks of tables before a run starts, and where they are. Imports no torch."""

from __future__ import annotations

import glob
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from amp_core.config.errors import suggest
from amp_core.config.schema import DataConfig

SHIPPED = {"breast_cancer": "breast_cancer.csv", "diabetes": "diabetes_data_raw.csv.gz", "digits": "digits.csv.gz"}
"""Tables inside the package scikit-learn: `data.path=sklearn:diabetes`."""


def targets_of(cfg: DataConfig) -> list[str]:
    """The names in `data.target`."""
    return [cfg.target] if isinstance(cfg.target, str) else list(cfg.target or ())


def table_file(path: str) -> Path:
    """The file of `data.path`; <package>:<file> is inside an installed package, which is not imported."""
    package, inside = _package_of(path), path.partition(":")[2]
    spec = importlib.util.find_spec(package) if package else None
    folder = next(iter(spec.submodule_search_locations or ()), None) if spec else None
    return Path(folder, inside) if folder else Path(path).expanduser()


def _package_of(path: str) -> str | None:
    """The package in <package>:<file>; None: it is another path."""
    package, colon, _ = path.partition(":")
    return package if colon and package.isidentifier() and not Path(path).exists() else None


def check_table(cfg: DataConfig) -> Iterator[str]:
    if not targets_of(cfg):
        yield "data.target=null: expected the name of the column to predict, or several: 'data.target=[a,b]'"
    if (cfg.window is None) != (cfg.horizon is None):
        lost, given = ("horizon", "window") if cfg.horizon is None else ("window", "horizon")
        yield f"data.{lost}=null: data.{given}={getattr(cfg, given)} needs it, both in rows"
    if isinstance(cfg.columns, dict):
        yield "data.columns: expected a list of columns, 'data.columns=[a,b]'"
    if cfg.options and "schema" not in cfg.options:
        yield f"data.options.{next(iter(cfg.options))}: has no effect, data=table has none; leave it out"
    if cfg.sampler and (cfg.window or len(targets_of(cfg)) > 1):
        yield "data.sampler=balanced: needs one target with classes; leave it out"
    needs_first = not (cfg.options and (cfg.eval_path or cfg.options.get("alone")))
    for key, path in (("path", cfg.path if needs_first else ""), ("eval_path", cfg.eval_path or "")):
        if not path:
            if needs_first and key == "path":
                yield "data.path=null: expected a CSV or parquet file, a folder or a glob of such files"
        elif path.startswith("sklearn:"):
            if (name := path.removeprefix("sklearn:")) not in SHIPPED:
                yield f"data.{key}={path}: there is no such table. {suggest(name, SHIPPED)}"
            elif importlib.util.find_spec("sklearn") is None:
                yield f"data.{key}={path}: needs the package scikit-learn: pip install 'amp-recipes[data]'"
        elif not (file := table_file(path)).exists() and not glob.glob(str(file)):
            package = _package_of(path)
            lost = package is not None and importlib.util.find_spec(package) is None
            why = f"needs the package {package}: pip install {package}" if lost else "there is no such file or folder"
            yield f"data.{key}={path}: {why}; expected CSV or parquet"
        elif ".parquet" in str(file) and importlib.util.find_spec("pyarrow") is None:
            yield f"data.{key}={path}: needs the package pyarrow: pip install 'amp-recipes[text]'"
