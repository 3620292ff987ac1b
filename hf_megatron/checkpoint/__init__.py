"""Reading and writing weights: strict loading, layout-independent initialisation, merged Hugging Face files."""
