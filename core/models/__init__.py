"""Models: which there are (`catalogue`), how one is made ready to train (`build`, `parts`, `weights`)."""
