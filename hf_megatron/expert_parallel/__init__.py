"""Expert parallelism: each rank holds some experts of every mixture, and tokens travel to them and back."""
