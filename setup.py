"""Which packages ship; everything else stands in pyproject.toml.

The configuration lies in `conf/`, where people edit it, and ships as `amp_core/conf`, where an installed core reads it.
train.py ships as `amp_recipes/train.py`, and the programs about runs beside it: a module `train` of its own would stand
in the way of other people's.
"""

from setuptools import find_namespace_packages, find_packages, setup

SCRIPTS = ("doctor", "export", "report", "runs")

setup(
    packages=[
        *find_packages(
            include=["amp_core", "amp_core.*", "amp_plugins", "amp_tools", "amp_tools.*", "recipes", "recipes.*"]
        ),
        *find_namespace_packages(include=["hydra_plugins.*"]),
        "amp_core.conf",
    ],
    py_modules=["amp_recipes.train", *(f"amp_recipes.scripts.{name}" for name in SCRIPTS)],
    package_dir={"amp_core.conf": "conf", "amp_recipes": "."},
    package_data={"": ["py.typed"], "amp_core.conf": ["**/*.yaml"], "amp_tools.report": ["*.html"]},
)
