"""Which packages ship; everything else stands in pyproject.toml.

The configuration lies in `conf/`, where people edit it, and ships as `amp_core/conf`, where an installed core reads it.
"""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["amp_*", "amp_*.*", "recipes", "recipes.*"]), "amp_core.conf"],
    package_dir={"amp_core.conf": "conf"},
    package_data={"amp_core.conf": ["**/*.yaml"], "amp_tools.report": ["*.html"]},
)
