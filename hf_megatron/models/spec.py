"""`ModelSpec`: plain frozen data, what a family's file states of a model type."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Attributes of a block whose product is the width of a part.
Width = tuple[str, ...]


@dataclass(frozen=True)
class HeadBlock:
    """A block whose heads work apart from each other between its first and its last projection.

    Args:
        counts (`tuple[str, ...]`): attributes that count heads or groups of them, or widths of all of them; those of
            the block's config are changed in a copy of it.
        weights (`Mapping[str, tuple[int, tuple[Width, ...]]]`): parameter or buffer of the block -> its dim of heads,
            and the parts of that dim that each have an entry for every head; `()` for one part.
        summed (`tuple[str, ...]`): biases that are added once to the sum of all heads.
        norms (`tuple[str, ...]`): RMS norms over all heads together, whose weights are among those.
        joined (`tuple[str, ...]`): linears without bias inside of the block that read all heads and are read by all.
        groups (`str`, *optional*): which of `counts` counts groups that heads read. Of a single one all tp ranks have
            the whole.
        norms_of_groups (`tuple[str, ...]`): norms over the heads of a group, whose weights are among those.
        lengths (`Mapping[str, str]`): attribute -> the weight of which it is the length along its dim of heads.
        routers (`tuple[str, ...]`): modules whose choices all heads read, and all ranks the logits that they return
            last.
        rounds (`int`): how often the parts follow each other in a weight, each time with a share of the heads, where a
            forward cuts its projections by a number of its own.
    """

    counts: tuple[str, ...]
    weights: Mapping[str, tuple[int, tuple[Width, ...]]]
    summed: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    groups: str | None = None
    norms_of_groups: tuple[str, ...] = ()
    lengths: Mapping[str, str] = field(default_factory=dict)
    routers: tuple[str, ...] = ()
    rounds: int = 1


@dataclass(frozen=True)
class ModelSpec:
    """What one model type needs to know to run in parallel; every entry is stated once and the mesh decides.

    Patterns are dotted module or parameter names in which `*` stands for one number, as in transformers' plans.

    Args:
        model_type (`str`): `config.model_type`.
        plan (`Mapping[str, str]`): module or parameter pattern -> name of a style.
        local_attributes (`Mapping[str, tuple[str, ...]]`): module pattern -> attributes that count heads or widths and
            are divided by tp_size; `config.` before one that the module reads of its config.
        local_arguments (`Mapping[str, tuple[str, ...]]`): attention block pattern -> keyword arguments that hold one
            entry per head and are cut to this rank's heads, such as alibi.
        regions (`Mapping[str, str]`): block pattern -> row linear pattern, for uniform blocks whose row linear is not
            their child (see `tensor_parallel/region.py`).
        multi_input_blocks (`tuple[str, ...]`): blocks whose linears read more than one tensor, as in cross attention.
        per_token_inputs (`Mapping[str, tuple[str, ...]]`): pattern of a block on whole sequences -> arguments with an
            entry per token that it reads beside its first one.
        transparent (`tuple[str, ...]`): wrappers inside a layer that only chain norms, dropout and blocks.
        per_token_arguments (`tuple[str, ...]`): arguments of a layer that hold one entry per token, `[batch, sequence,
            ...]`, and are split along the sequence like its hidden states.
        token_dim (`int`): which dim of hidden states `[batch, sequence, hidden]` or `[sequence, batch, hidden]` has the
            tokens.
        streams_lead (`bool`): layers hand on several streams before the rows, `[streams, batch, sequence, hidden]`;
            without, those of a token stand behind it, `[batch, sequence, streams, hidden]`.
        unshardable_arguments (`Mapping[str, str]`): arguments of layers that no part of a sequence can be computed
            beside -> why.
        hidden_state_recorder (`str`, *optional*): method of the module around the layers that keeps its first
            argument, the hidden states between them.
        no_cache (`str`, *optional*): why ranks of tp cannot keep what a call hands to the next one; a sentence.
        stacks (`tuple[str, ...]`): the layer stacks whose residual stream sequence parallelism splits; empty means
            that they are found by structure.
        plain_linear_classes (`tuple[str, ...]`): subclasses of nn.Linear whose forward is the plain product.
        no_sequence_parallel (`str`, *optional*): why the type has no sequence parallelism.
        layers (`str`, *optional*): the module list that a pipeline cuts; by default the one of the class's
            `_no_split_modules`.
        sublayer_lists (`tuple[str, ...]`): lists beside `layers` of modules that the loop calls before the one of the
            same number there, whose output is the layer's; the loop may work on it before the next layer.
        recorded_layers (`tuple[int, ...]`): numbers of the layers whose hidden states the loop keeps for all later
            layers.
        before_layers, after_layers (`tuple[str, ...]`): modules that run before or after the layers although they are
            defined on their other side; parameters of the model itself that are read before them.
        after_encoder (`tuple[str, ...]`): modules that read what an encoder's layers made before its decoder's layers
            do, although they are defined behind these.
        layer_num_outputs (`int`): values that a layer returns, hidden states among them; a pipeline sends those of a
            stage's last layer on.
        pre_layer_arguments (`tuple[str, ...]`): arguments of layers that the loop makes of what comes before the
            layers;
            a pipeline sends those of later layers on. One that the model's forward takes too is given to it on later
            stages.
        mutable_layer_arguments (`tuple[str, ...]`): arguments of layers that layers put tensors into for later ones.
        no_zero_bubble (`str`, *optional*): why gradients of its inputs and its weights cannot be computed in two
            steps, as in schedules with zero bubble.
        no_pipeline (`str`, *optional*): why the type's layers cannot lie on different ranks.
        image_features_argument (`str`, *optional*): argument of a forward that cannot do without images, which takes
            what towers make of them in their place; later stages of a pipeline get zeros in it. `a.b` is entry `b` of a
            mapping `a`.
        prefixes (`tuple[str, ...]`): modules before the layers that make what stands before the embedded text, such as
            features of images, from arguments of the forward; later stages of a pipeline need its length.
        run_on_all_stages (`tuple[str, ...]`): modules before the layers that every stage of a pipeline runs, for what
            they make without their weights, or the shape of what they make with them.
        full_sequence_blocks (`tuple[str, ...]`): blocks in which tokens meet otherwise than in transformers' attention
            functions; context parallelism computes them on whole rows. Those that keep a cache of their own are found
            by structure.
        layer_parameters (`tuple[str, ...]`): parameters of blocks that are handed to the layer around, which adds them
            to hidden states itself.
        head_sharded (`Mapping[str, HeadBlock]`): blocks on whole rows of which each rank can compute some heads.
        token_dims (`Mapping[str, int]`): arguments of a layer with an entry per token in another dim than the second,
            `per_token_arguments` among them.
        no_context_parallel (`str`, *optional*): why the type has no context parallelism.
        experts (`Mapping[str, str]`): module that holds all experts of a layer, along dim 0 of each weight -> its
            attribute that counts them; those of transformers' decorator of experts are found.
        identity_experts (`Mapping[str, str]`): such a module -> its attribute that counts the experts behind the others
            that hand tokens back as they are; its weights may have entries along dim 0 for these too, never read.
    """

    model_type: str
    plan: Mapping[str, str] = field(default_factory=dict)
    local_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    local_arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regions: Mapping[str, str] = field(default_factory=dict)
    multi_input_blocks: tuple[str, ...] = ()
    per_token_inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transparent: tuple[str, ...] = ()
    per_token_arguments: tuple[str, ...] = ()
    token_dim: int = 1
    streams_lead: bool = False
    unshardable_arguments: Mapping[str, str] = field(default_factory=dict)
    hidden_state_recorder: str | None = None
    no_cache: str | None = None
    stacks: tuple[str, ...] = ()
    plain_linear_classes: tuple[str, ...] = ()
    no_sequence_parallel: str | None = None
    layers: str | None = None
    sublayer_lists: tuple[str, ...] = ()
    recorded_layers: tuple[int, ...] = ()
    before_layers: tuple[str, ...] = ()
    after_layers: tuple[str, ...] = ()
    after_encoder: tuple[str, ...] = ()
    layer_num_outputs: int = 1
    pre_layer_arguments: tuple[str, ...] = ()
    mutable_layer_arguments: tuple[str, ...] = ()
    no_zero_bubble: str | None = None
    no_pipeline: str | None = None
    image_features_argument: str | None = None
    prefixes: tuple[str, ...] = ()
    run_on_all_stages: tuple[str, ...] = ()
    full_sequence_blocks: tuple[str, ...] = ()
    layer_parameters: tuple[str, ...] = ()
    head_sharded: Mapping[str, HeadBlock] = field(default_factory=dict)
    token_dims: Mapping[str, int] = field(default_factory=dict)
    no_context_parallel: str | None = None
    experts: Mapping[str, str] = field(default_factory=dict)
    identity_experts: Mapping[str, str] = field(default_factory=dict)
