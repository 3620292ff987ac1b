"""Expert parallelism: each rank holds some experts of every MoE block, and tokens are dispatched to them and back."""
