"""The Hub: folders pushed and pulled by several ranks, each file checked."""
