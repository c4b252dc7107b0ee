"""Packaging, driven by settings.ini so that name, version and requirements stand in one place."""

from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).parent
config = ConfigParser(delimiters=["="])
config.read(here / "settings.ini", encoding="utf-8")
cfg = config["DEFAULT"]


def words(key):
    return cfg.get(key, "").split()


notebooks, sweep, sklearn, dev = (words(f"{part}_requirements") for part in ("notebooks", "sweep", "sklearn", "dev"))
setup(
    name=cfg["lib_name"],
    version=cfg["version"],
    license="MIT",
    description=cfg["description"],
    keywords=words("keywords"),
    long_description=(here / "README.md").read_text(encoding="utf-8") if (here / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    author=cfg["author"],
    author_email=cfg["author_email"],
    url=cfg["git_url"],
    packages=find_packages(include=["aim_nb", "aim_nb.*"]),
    include_package_data=True,
    package_data={"aim_nb": ["paper_data/*", "weights/*", "data/*.json"]},
    install_requires=words("requirements"),
    extras_require={
        "notebooks": notebooks,
        "sweep": sweep,
        "sklearn": sklearn,
        "dev": [*notebooks, *sweep, *sklearn, *dev],
    },
    python_requires=">=" + cfg["min_python"],
    entry_points={
        "console_scripts": words("console_scripts"),
        "nbdev": [f"{cfg['lib_name']}={cfg['lib_path']}._modidx:d"],
    },
    zip_safe=False,
)
