"""Per-layer lists of a config.json: which layers own an indexer, which are mixtures of experts."""

from dsa_jax.config_validation import ConfigError, Fields

FULL, SHARED = "full", "shared"
DENSE, SPARSE = "dense", "sparse"


def indexer_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Which layers own an indexer: `indexer_types`, else the pattern, else frequency and offset, as in transformers.

    vLLM reads only the pattern, or frequency and offset. Where `indexer_types` says something else, two readers of one
    checkpoint would compute different models, so that is refused.

    Args:
      fields: The fields of config.json.
      num_layers: Number of layers.

    Returns:
      Per layer "full" or "shared"; the first is "full".

    Raises:
      ConfigError: A field has the wrong form, two fields disagree, or a shared layer comes before any full layer.
    """
    if fields.has("index_topk_pattern"):
        source = "index_topk_pattern"
        schedule = _pattern(fields, num_layers)
    else:
        freq = fields.integer("index_topk_freq", 1)
        offset = fields.integer("index_skip_topk_offset", 2, minimum=0)
        source = f"index_topk_freq={freq}, index_skip_topk_offset={offset}"
        schedule = tuple(FULL if max(i - offset + 1, 0) % freq == 0 else SHARED for i in range(num_layers))
    if fields.has("indexer_types"):
        types = fields.choices("indexer_types", num_layers, (FULL, SHARED))
        scheduled = fields.has("index_topk_pattern") or fields.has("index_topk_freq")
        for layer, (given, derived) in enumerate(zip(types, schedule, strict=True)):
            if scheduled and given != derived:
                raise ConfigError(f"indexer_types[{layer}]={given!r} contradicts {source}, which makes it {derived!r}")
        source, schedule = "indexer_types", types
    if schedule[0] == SHARED:
        raise ConfigError(f"{source} makes layer 0 'shared', but no full layer before it has a selection to reuse")
    return schedule


def _pattern(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """`index_topk_pattern`: a string of F and S, or a list of the words."""
    pattern = fields.get("index_topk_pattern")
    if not isinstance(pattern, str):
        return fields.choices("index_topk_pattern", num_layers, (FULL, SHARED))
    if len(pattern) != num_layers or set(pattern) - {"F", "S"}:
        raise ConfigError(f"index_topk_pattern={pattern!r} must be num_hidden_layers={num_layers} letters F or S")
    return tuple(FULL if letter == "F" else SHARED for letter in pattern)


def mlp_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Which layers are mixtures of experts: `mlp_layer_types`, else `first_k_dense_replace` and `moe_layer_freq`.

    Args:
      fields: The fields of config.json.
      num_layers: Number of layers.

    Returns:
      Per layer "dense" or "sparse".

    Raises:
      ConfigError: A field has the wrong form, both spellings are missing, or they disagree.
    """
    if not fields.has("mlp_layer_types") and not fields.has("first_k_dense_replace"):
        raise ConfigError("the field mlp_layer_types is missing, and first_k_dense_replace too")
    first = fields.integer("first_k_dense_replace", 0, minimum=0)
    freq = fields.integer("moe_layer_freq", 1)
    derived = tuple(SPARSE if i >= first and i % freq == 0 else DENSE for i in range(num_layers))
    if not fields.has("mlp_layer_types"):
        return derived
    types = fields.choices("mlp_layer_types", num_layers, (DENSE, SPARSE))
    for layer in range(num_layers if fields.has("first_k_dense_replace") else 0):
        if types[layer] != derived[layer]:
            raise ConfigError(
                f"mlp_layer_types[{layer}]={types[layer]!r} contradicts first_k_dense_replace={first}, "
                f"moe_layer_freq={freq}, which make it {derived[layer]!r}"
            )
    return types
