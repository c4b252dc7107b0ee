__version__ = "0.2.0"

_HOMES = {"AIM": "aim", "FewShotClassifier": "classifiers", "ContinualClassifier": "classifiers"}


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # on demand, so that the command line starts without torch

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
