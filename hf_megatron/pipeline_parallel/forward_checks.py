"""Checks of a pipelined call's arguments, before any stage runs; they raise on every rank of the pipeline."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..compat.shared import Shared
from ..compat.transformers_models import loss_functions, uses_loss_function
from ..core.communication.rank_errors import gather
from ..errors import ConfigError, RankError, UnsupportedError
from ..losses.targets import IGNORE_INDEX, LABELS, OF_SENTENCES, POSITIONS, is_target, target_names
from ..losses.token_loss import TokenLoss
from ..parallel_state import ParallelState
from ..tensor_parallel.vocab_range import require_tokens
from .kv_cache import cache_name
from .off_stage_module import OffRankShard

# Attribute with the probability that a model's loop skips a layer.
_LEFT_OUT = "layerdrop"


class CallChecks(Shared):
    """The checks of one model's calls."""

    def __init__(self, model: Any, state: ParallelState, *, mixes_documents: bool):
        self.model, self.router_aux_loss_scope = model, state.config.router_aux_loss_scope
        known = (*POSITIONS, *OF_SENTENCES)
        self._known_targets = known if state.loss.shifts is None else (*LABELS, *known)
        self._leaving_out = [module for module in model.modules() if _LEFT_OUT in vars(module)]
        self._has_encoder = model.config.is_encoder_decoder
        self._takes_token_loss = isinstance(model.loss_function, TokenLoss) and uses_loss_function(model)
        # Read now: a loss function that a script assigns later says nothing about the labels.
        self._labels_are_tokens = isinstance(model.loss_function, TokenLoss)
        self._labels_are_classes = model.loss_function in loss_functions()
        # Resizing changes the shape of the sharding; wrapping the embedding renames it, and the last count stays.
        self._shardings = state.shardings
        self._embedding, self._tokens = _embedding(model, state)
        # If the shift of labels is unknown, or labels are not shifted, targets may depend on neighboring documents.
        self._mixes_documents = mixes_documents or not state.loss.shifts

    def require_tokens(self, arguments: Mapping[str, Any]) -> None:
        """Raises `IndexError` on every rank for token ids or labels that only the first or last stage would look up.

        Raises:
            IndexError: if a token id or a label is out of range.
            ValueError: if labels and tokens have different shapes `[batch, sequence]`.
        """
        ids, labels = arguments.get("input_ids"), arguments.get("labels")
        if self._embedding in self._shardings:
            self._tokens = self._shardings[self._embedding].shape[0]
        for token_ids in (ids, arguments.get("decoder_input_ids")):
            if isinstance(token_ids, Tensor) and self._tokens is not None:
                require_tokens(token_ids, self._tokens, "token id")
        if labels is not None and self._takes_token_loss and isinstance(self.model.loss_function, TokenLoss):
            tokens: Any = ids if ids is not None else arguments.get("inputs_embeds")
            kept = arguments.get("logits_to_keep")
            # Encoder-decoders have one decoder token per label by construction.
            takes_all = (kept is None or (isinstance(kept, int) and kept == 0)) and not self._has_encoder
            # Otherwise only the last stage would raise, and the other ranks would hang.
            if takes_all and tokens is not None and labels.shape[:2] != tokens.shape[:2]:
                raise ValueError(
                    f"labels {tuple(labels.shape)} for tokens {tuple(tokens.shape[:2])}: expected a label per token."
                )
        # Resizing changes the vocabulary, and a script that replaces a head changes the number of labels.
        config, are_tokens, classes = self.model.config, self._labels_are_tokens, 0
        if are_tokens:
            classes = config.get_text_config().vocab_size
        elif self._labels_are_classes:
            classes = config.num_labels
        if labels is not None and not labels.is_floating_point() and classes > 1:
            ignored = arguments.get("ignore_index", IGNORE_INDEX)
            require_tokens(labels, classes, "label", ignored, are_classes=not are_tokens)

    def require_known_loss(self, arguments: Mapping[str, Any]) -> None:
        """Raises `UnsupportedError` for targets whose loss terms a pipeline cannot count."""
        targets = [name for name, value in arguments.items() if isinstance(value, Tensor) and is_target(name)]
        others = [name for name in targets if name not in self._known_targets]
        if others:
            raise UnsupportedError(
                f"{type(self.model).__name__} with {', '.join(others)}: a pipeline supports losses of "
                f"{', '.join(self._known_targets)} only, averaged over tokens or samples. Call the model without these "
                "and compute the loss from its logits."
            )
        losses = target_names(arguments)
        if arguments.get("num_items_in_batch") is not None and losses and losses != ("labels",):
            raise UnsupportedError(
                f"{type(self.model).__name__} with num_items_in_batch and {', '.join(losses)}: it is supported with "
                "labels only, because other losses have a different number of terms. Leave it out."
            )

    def reject_skipped_layers(self) -> None:
        """Raises `UnsupportedError` for LayerDrop in training: each stage would draw other layers to skip."""
        if self.model.training and any(vars(module).get(_LEFT_OUT) for module in self._leaving_out):
            raise UnsupportedError(
                f"{type(self.model).__name__} skips layers at random in training ({_LEFT_OUT} > 0): pipeline stages "
                "would skip different ones. Load it with encoder_layerdrop=0.0, decoder_layerdrop=0.0 or "
                "layerdrop=0.0, depending on its config, or with pp_size=1."
            )

    def require_one_stage_each(self, arguments: Mapping[str, Any], *, fills_cache: bool) -> None:
        """Raises `UnsupportedError` for outputs of all layers, which no rank has, or a cache in a training step."""
        for name in ("output_attentions", "output_hidden_states"):
            if arguments.get(name) or getattr(self.model.config, name, False):
                raise UnsupportedError(f"{name}=True: no rank of a pipeline has all layers. Use pp_size=1.")
        if not fills_cache and (past := cache_name(arguments)) is not None:
            raise UnsupportedError(f"{past} in a training step: a pipeline supports caches in evaluation only.")

    def mixes_documents(self, arguments: Mapping[str, Any]) -> bool:
        """Returns whether packed documents interact outside attention, such as in router losses."""
        return self._mixes_documents or (
            self._asks_for_routers(arguments) and self.router_aux_loss_scope != "microbatch"
        )

    def _asks_for_routers(self, arguments: Mapping[str, Any]) -> bool:
        argument = arguments.get("output_router_logits")
        return bool(
            getattr(self.model.config.get_text_config(), "output_router_logits", False)
            if argument is None
            else argument
        )

    def has_batch_statistics(self, arguments: Mapping[str, Any]) -> bool:
        """Returns whether a call computes a router loss of the full batch, which is no sum over microbatches."""
        return self._asks_for_routers(arguments) and self.router_aux_loss_scope in ("batch", "global")

    def counts_over_ranks(self, arguments: Mapping[str, Any]) -> bool:
        """Returns whether the expert counts of each microbatch are summed over data-parallel ranks."""
        return self._asks_for_routers(arguments) and self.router_aux_loss_scope == "global"

    def reject_batch_statistics(self, arguments: Mapping[str, Any]) -> None:
        """Raises `ConfigError` for a training call on several microbatches with a router loss of the full batch."""
        if self.has_batch_statistics(arguments) and self.router_aux_loss_scope == "batch":
            raise ConfigError(
                "output_router_logits=True with several microbatches: the router loss of a batch cannot be computed "
                "from the losses of its microbatches. Set MegatronConfig.router_aux_loss_scope='sequence' (per "
                "sequence, the same on every layout), 'global' (expert counts of the step so far) or 'microbatch' "
                "(per microbatch), or num_microbatches=1."
            )


def _embedding(model: Any, state: ParallelState) -> tuple[str, int | None]:
    """Returns the name of a text model's embedding weight and its number of tokens; collective over the pipeline.

    The number is `None` for multimodal models, which may use ids outside the embedding as image placeholders.
    """
    if model.config.get_text_config() is not model.config:
        return "", None
    try:
        embedding = model.get_input_embeddings()
    except OffRankShard:
        # The embedding is inside another module (BERT's embeddings), whose children only the first stage has.
        embedding = None
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    sharding = state.shardings.get(f"{name}.weight")
    local_entry = None if sharding is None else (f"{name}.weight", sharding.shape[0])
    entries = gather(
        local_entry, state.mesh.host_group("pp"), "Counting the tokens that the first stage knows", error_type=RankError
    )
    return next((entry for entry in entries if entry is not None), ("", None))
