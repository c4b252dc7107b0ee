__version__ = "0.2.0"


def __getattr__(name):
    if name == "AIM":  # on demand, so that the command line starts without torch
        from .aim import AIM

        return AIM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
