"""Load a trained model, generate answers and evaluate."""
