"""How the ecosystem's loops meet the library, one file each, all gated on a model being ours."""
