"""What `make lab` starts JupyterLab with: a notebook is cleaned as it is saved, so that opening and saving one changes nothing in git."""

from nbdev.clean import clean_jupyter

c = get_config()  # noqa: F821 (jupyter gives it)


def clean_notebook(model, **kwargs):
    "Clean a notebook as nbdev_clean does, and drop the state of its widgets, in which a browser writes 2.0 as 2."
    clean_jupyter(model=model, **kwargs)
    if model["type"] == "notebook":
        model["content"]["metadata"].pop("widgets", None)


c.ContentsManager.pre_save_hook = clean_notebook
