"""Fine-tuning of image classifiers: everything that is not a widget."""
