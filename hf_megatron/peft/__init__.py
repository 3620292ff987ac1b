"""PEFT's adapters on laid out models: placed by the style of the linear that they sit on."""
