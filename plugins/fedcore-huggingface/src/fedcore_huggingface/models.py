"""Networks of transformers, split into encoder and classifier: for images, for sequences, and for next tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcore import ConfigError, SplitModel
from fedcore_huggingface.causal import causal_model
from fedcore_huggingface.spec import folder_of, refusing
from fedcore_huggingface.wrapped import OfTransformers
from fedcore_zoo import SequenceBatch, SplitNetwork, load_torchvision

WEIGHTS = "model.safetensors"
CAUSAL = "AutoModelForCausalLM"


class ImageLogits(OfTransformers):
    """An image classifier of transformers as a network from images to logits."""

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C) logits of (B, channels, height, width)."""
        logits: Tensor = self.network(pixel_values=x).logits
        return logits


class SequenceFeatures(OfTransformers):
    """A sequence classifier of transformers without its last layer: sequences to features (B, d).

    :param pad: the token that fills shorter sequences; it is masked out.
    """

    def __init__(self, network: nn.Module, pad: int) -> None:
        super().__init__(network)
        self.pad = pad

    def forward(self, batch: SequenceBatch) -> Tensor:
        """Return the features of a batch of sequences."""
        tokens, mask = padded(batch, self.pad)
        features: Tensor = self.network(input_ids=tokens, attention_mask=mask).logits
        return features


def padded(batch: SequenceBatch, pad: int) -> tuple[Tensor, Tensor]:
    """Return sequences as tokens (B, L), padded at their ends, and the mask (B, L) int64 of the sequences' own tokens.

    >>> padded(SequenceBatch(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 3])), 0)
    (tensor([[5, 0],
            [6, 7]]), tensor([[1, 0],
            [1, 1]]))
    """
    lengths = batch.offsets.diff()
    mask = torch.arange(int(lengths.max()), device=lengths.device) < lengths.unsqueeze(1)  # (B, L)
    tokens = torch.full_like(mask, pad, dtype=torch.int64).masked_scatter(mask, batch.values)
    return tokens, mask.to(torch.int64)


def model(rest: str) -> Callable[[int, tuple[int, ...]], nn.Module]:
    """A network of transformers by its folder (``save_pretrained``), with weights if model.safetensors is there.

    It is a classifier of images or sequences, or a causal language model where the data set has blocks of tokens.

    :raises ConfigError: there is no such folder, or no configuration of such a network in it.
    """
    name = f"hf:{rest}"
    folder = folder_of(rest, name)
    kind, config = _configuration(folder, name)

    def images(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
        if len(input_shape) != 3:
            raise ConfigError(f"model {name!r} takes images, but this data set's inputs have shape {input_shape}")
        channels, height, width = input_shape
        for attribute, needed in (
            ("image_size", height if height == width else (height, width)),
            ("num_channels", channels),
        ):
            own = getattr(config, attribute, None)
            if own is not None and own != needed:
                _refuse_with_weights(folder, name, attribute, own, needed)
                setattr(config, attribute, needed)
        return ImageLogits(_network(kind, config, folder, num_classes, name))

    def texts(num_classes: int, input_shape: tuple[int, ...]) -> SplitModel:
        if len(input_shape) == 2:
            return causal_model(_language_network(config, folder, *input_shape, name), name)
        if kind == CAUSAL:
            raise ConfigError(f"model {name!r}: transformers has no classifier of type {config.model_type!r}")
        (vocabulary,) = input_shape
        if config.vocab_size < vocabulary:
            _refuse_with_weights(folder, name, "vocab_size", config.vocab_size, vocabulary)
            config.vocab_size = vocabulary
        network = _network(kind, config, folder, num_classes, name)
        pad = _padding(config)
        config.pad_token_id = pad  # networks that read the last token look for the last that is another
        return _split(SequenceFeatures(network, pad), num_classes, name)

    if kind == "AutoModelForImageClassification":
        return images
    texts.takes = ("sequences", "tokens")  # type: ignore[attr-defined]
    return texts


def _padding(config: Any) -> int:
    """Return the token that pads a sequence: the network's own, else its end-of-sequence token.

    Networks such as GPT-2 have no padding token, and their token 0 is a word.
    """
    for token in (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id")):
        if isinstance(token, int) and 0 <= token < config.vocab_size:
            return token
    return 0


def _configuration(folder: Path, name: str) -> tuple[str, Any]:
    """Return which of transformers' classes makes the network, and its configuration."""
    import transformers

    load_torchvision()  # transformers imports it, and it may need help
    with refusing(f"model {name!r}: {folder} holds no config.json of transformers"):
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    for kind in ("AutoModelForImageClassification", "AutoModelForSequenceClassification", CAUSAL):
        if type(config) in getattr(transformers, kind)._model_mapping:
            return kind, config
    raise ConfigError(
        f"model {name!r}: transformers has no classifier of images or sequences, and no causal language model, of type "
        f"{config.model_type!r}"
    )


def _language_network(config: Any, folder: Path, vocabulary: int, length: int, name: str) -> Any:
    """Return the causal language model for tokens below ``vocabulary`` in blocks of a length.

    Weights of further tokens are left out: the tokenizer never makes such tokens.
    """
    import transformers

    if type(config) not in getattr(transformers, CAUSAL)._model_mapping:
        raise ConfigError(
            f"model {name!r}: transformers has no causal language model of type {config.model_type!r}, which the task "
            "next-token needs, such as gpt2 or llama"
        )
    context = getattr(config, "max_position_embeddings", None)
    if context is not None and length > context:
        raise ConfigError(
            f"model {name!r} reads up to {context} tokens, but the data set's blocks have {length}; write "
            f"?block_size={context} or less"
        )
    if config.vocab_size < vocabulary:
        _refuse_with_weights(folder, name, "vocab_size", config.vocab_size, vocabulary)
    if not (folder / WEIGHTS).is_file():
        config.vocab_size = vocabulary
    network = _network(CAUSAL, config, folder, None, name)
    if config.vocab_size > vocabulary:
        network.resize_token_embeddings(vocabulary)
    return network


def _network(kind: str, config: Any, folder: Path, num_classes: int | None, name: str) -> Any:
    """Return the network, with the folder's weights if there are some, else with fresh weights.

    :param num_classes: of a classifier; None for another network.
    """
    import transformers

    auto_class: Any = getattr(transformers, kind)
    if num_classes is not None:
        config.num_labels = num_classes
    if not (folder / WEIGHTS).is_file():
        return auto_class.from_config(config, trust_remote_code=False)
    advice = ". Save it again with save_pretrained, or delete it for fresh weights"
    with refusing(f"model {name!r}: {folder / WEIGHTS} cannot be used", advice):
        return auto_class.from_pretrained(
            str(folder),
            config=config,
            ignore_mismatched_sizes=num_classes is not None,  # the last layer, which build_model renews
            use_safetensors=True,
            dtype=torch.float32,  # else that of the file: updates of half precision would be rounded away
            local_files_only=True,
            trust_remote_code=False,
        )


def _refuse_with_weights(folder: Path, name: str, attribute: str, own: Any, needed: Any) -> None:
    """Refuse to change a network that has weights."""
    if (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"model {name!r}: the weights in {folder} are for {attribute} {own}, this data set needs {needed}"
        )


def _split(base: SequenceFeatures, num_classes: int, name: str) -> SplitModel:
    """Take the last layer off and return encoder and classifier.

    :raises ConfigError: the network does not end with a linear layer that gives the logits.
    """
    layers = {path: layer for path, layer in base.named_modules() if isinstance(layer, nn.Linear)}
    last = next((path for path in reversed(layers) if layers[path].out_features == num_classes), None)
    if last is None:
        raise ConfigError(f"model {name!r} does not end with a linear layer that gives the logits")
    layer = layers[last]
    parent, _, attribute = last.rpartition(".")
    setattr(base.get_submodule(parent), attribute, nn.Identity())
    one = SequenceBatch(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2]))
    was_training = base.training
    with torch.no_grad():
        features = base.eval()(one)
    base.train(was_training)
    if features.shape != (1, layer.in_features):
        raise ConfigError(
            f"model {name!r}: its last layer takes {layer.in_features} features, but {math.prod(features.shape)} come "
            "without it; this network cannot be split"
        )
    split = SplitNetwork(base, layer, last=last)
    split.renew_classifier(layer.in_features)
    return split
