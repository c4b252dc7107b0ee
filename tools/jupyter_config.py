"""What `make lab` starts JupyterLab with: a notebook is cleaned as it is saved, so that opening and saving one changes nothing in git."""

from nbdev.clean import clean_jupyter

c = get_config()  # noqa: F821 (jupyter gives it)
c.ContentsManager.pre_save_hook = clean_jupyter
