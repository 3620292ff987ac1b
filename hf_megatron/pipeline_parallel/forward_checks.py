"""What is looked at in the arguments of a pipelined call before any stage runs: every rank raises alike."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..compat.shared import Shared
from ..compat.transformers_models import loss_functions, uses_loss_function
from ..core.communication.rank_errors import gather
from ..errors import ConfigError, UnsupportedError
from ..losses.targets import IGNORE_INDEX, LABELS, OF_SENTENCES, POSITIONS, is_target, target_names
from ..losses.token_loss import TokenLoss
from ..parallel_state import ParallelState
from ..tensor_parallel.vocab_range import require_tokens
from .kv_cache import cache_name
from .off_stage_module import OffRankShard

# The rate at which a loop leaves layers out.
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
        self._tokens, self._classes = _tokens(model, state), _classes(model)
        # Where rows say nothing of the next token, targets join them too.
        self._mixes_documents = mixes_documents or not state.loss.shifts

    def require_tokens(self, arguments: Mapping[str, Any]) -> None:
        """Raises `IndexError` on every rank, where the first or the last stage alone would look the tokens up."""
        ids, labels = arguments.get("input_ids"), arguments.get("labels")
        for given in (ids, arguments.get("decoder_input_ids")):
            if isinstance(given, Tensor) and self._tokens is not None:
                require_tokens(given, self._tokens, "token id")
        if labels is not None and self._takes_token_loss and isinstance(self.model.loss_function, TokenLoss):
            tokens: Any = ids if ids is not None else arguments.get("inputs_embeds")
            kept = arguments.get("logits_to_keep")
            # A decoder behind an encoder has a token for each label.
            takes_all = (kept is None or (isinstance(kept, int) and kept == 0)) and not self._has_encoder
            # The last stage alone would find it, and the others would wait for it.
            if takes_all and tokens is not None and labels.shape[:2] != tokens.shape[:2]:
                raise ValueError(
                    f"labels {tuple(labels.shape)} for tokens {tuple(tokens.shape[:2])}: expected a label per token."
                )
        if labels is not None and not labels.is_floating_point() and self._classes > 1:
            require_tokens(labels, self._classes, "label", arguments.get("ignore_index", IGNORE_INDEX))

    def require_known_loss(self, arguments: Mapping[str, Any]) -> None:
        """Raises for targets that a pipeline cannot count."""
        given = [name for name, value in arguments.items() if isinstance(value, Tensor) and is_target(name)]
        others = [name for name in given if name not in self._known_targets]
        if others:
            raise UnsupportedError(
                f"{type(self.model).__name__} with {', '.join(others)}: a pipeline knows losses of "
                f"{', '.join(self._known_targets)}, that are a mean over tokens or rows. Call it without and compute "
                "the loss from its logits."
            )
        losses = target_names(arguments)
        if arguments.get("num_items_in_batch") is not None and losses and losses != ("labels",):
            raise UnsupportedError(
                f"{type(self.model).__name__} with num_items_in_batch and {', '.join(losses)}: one number for losses "
                "that have numbers of terms of their own. Leave it out."
            )

    def reject_skipped_layers(self) -> None:
        """Raises for layers that a loop leaves out at random in training: each stage would draw others."""
        if self.model.training and any(vars(module).get(_LEFT_OUT) for module in self._leaving_out):
            raise UnsupportedError(
                f"{type(self.model).__name__} leaves layers out at random in training ({_LEFT_OUT} > 0): pipeline "
                "stages would draw apart. Load it with encoder_layerdrop=0.0, decoder_layerdrop=0.0 or layerdrop=0.0, "
                "as its config names them, or with pp_size=1."
            )

    def require_one_stage_each(self, arguments: Mapping[str, Any], *, fills_cache: bool) -> None:
        """Raises where outputs of all layers are wanted, or a cache in a call that fills none."""
        for name in ("output_attentions", "output_hidden_states"):
            if arguments.get(name) or getattr(self.model.config, name, False):
                raise UnsupportedError(f"{name}=True: no rank of a pipeline has those of all layers.")
        if not fills_cache and (past := cache_name(arguments)) is not None:
            raise UnsupportedError(f"{past} in a training step: a pipeline fills caches in evaluation only.")

    def mixes_documents(self, arguments: Mapping[str, Any]) -> bool:
        """Tells whether the documents of a row meet elsewhere than in attention, or in its router losses."""
        return self._mixes_documents or (
            self._asks_for_routers(arguments) and self.router_aux_loss_scope != "microbatch"
        )

    def _asks_for_routers(self, arguments: Mapping[str, Any]) -> bool:
        asked = arguments.get("output_router_logits")
        return bool(
            getattr(self.model.config.get_text_config(), "output_router_logits", False) if asked is None else asked
        )

    def has_batch_statistics(self, arguments: Mapping[str, Any]) -> bool:
        """Tells whether a call takes a router loss of the whole batch, which microbatches do not add up to."""
        return self._asks_for_routers(arguments) and self.router_aux_loss_scope in ("batch", "global")

    def counts_over_ranks(self, arguments: Mapping[str, Any]) -> bool:
        """Tells whether dp ranks add up what the routers of each of their microbatches have chosen."""
        return self._asks_for_routers(arguments) and self.router_aux_loss_scope == "global"

    def reject_batch_statistics(self, arguments: Mapping[str, Any]) -> None:
        """Raises for a training call on several microbatches that takes the router loss of their batch."""
        if self.has_batch_statistics(arguments) and self.router_aux_loss_scope == "batch":
            raise ConfigError(
                "output_router_logits=True with several microbatches: the router loss of a batch cannot be computed "
                "from those of its microbatches. Set MegatronConfig.router_aux_loss_scope='sequence' (each row's "
                "own, the "
                "same on every layout), 'global' (counts of the step so far) or 'microbatch' (each microbatch's own), "
                "or num_microbatches=1."
            )


def _tokens(model: Any, state: ParallelState) -> int | None:
    """Counts the token ids that a text model knows; others may have ids that stand for images."""
    if model.config.get_text_config() is not model.config:
        return None
    try:
        embedding = model.get_input_embeddings()
    except OffRankShard:
        # A module of several parts, such as BERT's embeddings, whose parts the first stage alone has.
        embedding = None
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    sharding = state.shardings.get(f"{name}.weight")
    own = None if sharding is None else sharding.shape[0]
    known = gather(own, state.mesh.host_group("pp"), "Counting the tokens that the first stage knows")
    return next((count for count in known if count is not None), None)


def _classes(model: Any) -> int:
    """Counts the classes that labels choose from, 0 where nobody knows."""
    config, kind = model.config, model.loss_function
    if isinstance(kind, TokenLoss):
        return config.get_text_config().vocab_size
    return config.num_labels if kind in loss_functions() else 0
