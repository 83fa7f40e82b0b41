"""The models of benchmarks/zoo.py, with names such as tv:resnet18, and small random data for them.

Forward passes are deterministic (no dropout, stochastic depth or masking), because ranks draw different
numbers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES, NUM_SAMPLES, GLOBAL_BATCH = 4, 16, 8
# A small model of each family, and its image size in pixels.
TIMM = {
    "beit_base_patch16_224": 64,
    "halonet26t": 256,
    "gernet_s": 64,
    "cait_xxs24_224": 64,
    "coat_lite_tiny": 64,
    "convit_tiny": 64,
    "convmixer_768_32": 64,
    "test_convnext": 64,
    "crossvit_9_240": 240,
    "cspresnet50": 64,
    "davit_tiny": 64,
    "deit_tiny_distilled_patch16_224": 64,
    "densenet121": 64,
    "dla46_c": 64,
    "dpn48b": 64,
    "edgenext_xx_small": 64,
    "efficientformer_l1": 224,
    "efficientformerv2_s0": 224,
    "test_efficientnet": 64,
    "efficientvit_b0": 64,
    "efficientvit_m0": 224,
    "eva02_tiny_patch14_224": 56,
    "fastvit_t8": 64,
    "focalnet_tiny_srf": 64,
    "gcvit_xxtiny": 224,
    "ghostnet_050": 64,
    "hgnetv2_b0": 64,
    "hiera_tiny_224": 224,
    "hrnet_w18_small": 64,
    "inception_next_atto": 64,
    "levit_128s": 224,
    "test_mambaout": 64,
    "coatnet_nano_cc_224": 224,
    "poolformer_s12": 64,
    "mixer_s32_224": 64,
    "lcnet_035": 64,
    "mobilevit_xxs": 64,
    "mvitv2_tiny": 224,
    "nest_tiny": 64,
    "test_nfnet": 64,
    "pit_ti_224": 64,
    "pvt_v2_b0": 64,
    "regnetx_002": 64,
    "repvit_m1": 64,
    "res2net50_14w_8s": 64,
    "resnest14d": 64,
    "test_resnet": 64,
    "resnetv2_18": 64,
    "rexnet_100": 64,
    "sequencer2d_s": 224,
    "legacy_seresnet18": 64,
    "skresnet18": 64,
    "swin_tiny_patch4_window7_224": 224,
    "swinv2_cr_tiny_224": 224,
    "tiny_vit_5m_224": 224,
    "tnt_s_patch16_224": 64,
    "twins_svt_small": 64,
    "test_vit": 160,
    "test_vit_relpos": 160,
    "volo_d1_224": 64,
    "ese_vovnet19b_slim": 64,
    "xcit_nano_12_p16_224": 64,
}
_TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"num_key_value_heads": 1, "head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ENCODER_DECODER = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 2,
}
_PICTURES = {"image_size": 32, "patch_size": 8, "num_labels": CLASSES}
_XLNET = {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}
_SWIN = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "num_attention_heads": None}
_SOUND = {
    "conv_dim": [32, 32],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "apply_spec_augment": False,
    "num_labels": CLASSES,
}
# By architecture: the head, and arguments in addition to _TINY.
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("CausalLM", {}),
    "gpt_neo": ("CausalLM", {"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "gpt_neox": ("CausalLM", {}),
    "gptj": ("CausalLM", {"rotary_dim": 8}),
    "bloom": ("CausalLM", {}),
    "opt": ("CausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "falcon": ("CausalLM", {}),
    "llama": ("CausalLM", _HEADS),
    "mistral": ("CausalLM", _HEADS),
    "mixtral": ("CausalLM", {**_HEADS, "num_local_experts": 4}),
    "qwen2": ("CausalLM", {"num_key_value_heads": 1}),
    "qwen3": ("CausalLM", _HEADS),
    "qwen3_moe": ("CausalLM", {**_HEADS, **_EXPERTS}),
    "gemma2": ("CausalLM", _HEADS),
    "phi": ("CausalLM", {}),
    "phi3": ("CausalLM", {"num_key_value_heads": 1}),
    "olmo": ("CausalLM", {}),
    "stablelm": ("CausalLM", {"num_key_value_heads": 1}),
    "cohere": ("CausalLM", {"num_key_value_heads": 1}),
    "starcoder2": ("CausalLM", {"num_key_value_heads": 1}),
    "mamba": ("CausalLM", {"state_size": 8}),
    "bert": ("MaskedLM", {}),
    "roberta": ("MaskedLM", {}),
    "albert": ("MaskedLM", {"embedding_size": 16}),
    "distilbert": ("MaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}),
    "electra": ("MaskedLM", {"embedding_size": 16}),
    "deberta-v2": ("MaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "xlnet": ("SequenceClassification", {**_XLNET, "max_position_embeddings": None}),
    "t5": (
        "Seq2SeqLM",
        {"decoder_start_token_id": 0, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2},
    ),
    "bart": ("Seq2SeqLM", _ENCODER_DECODER),
    "marian": ("Seq2SeqLM", _ENCODER_DECODER),
    "pegasus": ("Seq2SeqLM", _ENCODER_DECODER),
    "vit": ("ImageClassification", _PICTURES),
    "deit": ("ImageClassification", {**_PICTURES, "architectures": ["DeiTForImageClassification"]}),
    "beit": ("ImageClassification", _PICTURES),
    "dinov2": ("ImageClassification", _PICTURES),
    "swin": ("ImageClassification", {**_PICTURES, "patch_size": 2, **_SWIN}),
    "convnext": (
        "ImageClassification",
        {
            **_PICTURES,
            "patch_size": 4,
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1] * 4,
            "num_hidden_layers": None,
        },
    ),
    "wav2vec2": ("AudioClassification", _SOUND),
    "hubert": ("AudioClassification", _SOUND),
    "whisper": ("SpeechSeq2Seq", {**_ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 16}),
}
_CHANCE = {"p", "drop_prob", "drop_rate", "dropout", "dropout_p", "attn_drop", "layerdrop", "dropout_prob"}


def names() -> list[str]:
    import torchvision.models

    found = [f"tv:{name}" for name in torchvision.models.list_models(module=torchvision.models)]
    return [*found, *(f"timm:{name}" for name in TIMM), *(f"hf:{name}" for name in TRANSFORMERS)]


def build(name: str) -> nn.Module:
    kind, _, name = name.partition(":")
    model = {"tv": _torchvisions, "timm": _timms, "hf": _hugging_faces}[kind](name)
    for module in model.modules():
        for attribute in _CHANCE & vars(module).keys():
            if isinstance(getattr(module, attribute), float):
                setattr(module, attribute, 0.0)
    return model


def task(name: str) -> dict[str, Any]:
    """Return the task of a model as a setting."""
    kind, _, architecture = name.partition(":")
    if kind != "hf":
        return {"_target_": "trainer.tasks.Classification"}
    return {"_target_": "trainer.tasks.OwnLoss", "shifted": TRANSFORMERS[architecture][0] == "CausalLM"}


def pixels(name: str) -> int:
    """Return the smallest possible side length of the model's images."""
    kind, _, name = name.partition(":")
    if kind == "timm":
        return TIMM[name]
    from models.vision import SMALL_STEMS

    least = {"vit_h_14": 70, "inception_v3": 75, "maxvit_t": 224}
    return least.get(name, 32 if name.startswith(tuple(SMALL_STEMS)) else 64)


def _torchvisions(name: str) -> nn.Module:
    from models.vision import vision

    side = pixels(f"tv:{name}")
    return vision(name, (3, side, side), CLASSES)


def _timms(name: str) -> nn.Module:
    import timm

    try:  # models with position tables need the image size
        return timm.create_model(name, pretrained=False, num_classes=CLASSES, img_size=TIMM[name])
    except TypeError:
        return timm.create_model(name, pretrained=False, num_classes=CLASSES)


def _hugging_faces(name: str) -> nn.Module:
    import transformers

    head, options = TRANSFORMERS[name]
    settings = {key: value for key, value in {**_TINY, **options}.items() if value is not None}
    config = transformers.AutoConfig.for_model(name, **settings)
    for key, value in vars(config).items():
        if ("drop" in key or key == "mask_time_prob") and isinstance(value, float):
            setattr(config, key, 0.0)
    config.use_cache = False
    return getattr(transformers, f"AutoModelFor{head}").from_config(config)


class Samples(Dataset[Any]):
    """Inputs and labels for the model `name`.

    Args:
        micro_batches_of: the number of ranks whose micro-batches a single process gets; 1 keeps the order.
    """

    num_classes = CLASSES

    def __init__(self, split: str, name: str, micro_batches_of: int = 1, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(1 + (split == "eval"))
        kind, _, architecture = name.partition(":")
        head = TRANSFORMERS[architecture][0] if kind == "hf" else ""
        tokens = torch.randint(3, 64, (NUM_SAMPLES, 12), generator=generator)
        labels = torch.randint(CLASSES, (NUM_SAMPLES,), generator=generator)
        if head == "ImageClassification":
            images = torch.randn(NUM_SAMPLES, 3, 32, 32, generator=generator)
            self.columns: Any = {"pixel_values": images, "labels": labels}
        elif head == "AudioClassification":
            self.columns = {
                "input_values": torch.randn(NUM_SAMPLES, 400, generator=generator),
                "labels": labels,
            }
        elif head == "SpeechSeq2Seq":
            features = torch.randn(NUM_SAMPLES, 8, 32, generator=generator)
            self.columns = {"input_features": features, "labels": tokens}
        elif head == "SequenceClassification":
            self.columns = {"input_ids": tokens, "labels": labels % 2}
        elif head:
            self.columns = {"input_ids": tokens, "labels": tokens.clone()}
        else:
            side = pixels(name)
            self.columns = (torch.randn(NUM_SAMPLES, 3, side, side, generator=generator), labels)
        self.sample_numbers = _sample_numbers(micro_batches_of, seed)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitems__(self, indices: Sequence[int]) -> Any:
        numbers = self.sample_numbers[torch.tensor(indices)]
        if isinstance(self.columns, dict):
            return {key: values[numbers] for key, values in self.columns.items()}
        return tuple(values[numbers] for values in self.columns)

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("samples are read in batches")


def _sample_numbers(ranks: int, seed: int) -> Tensor:
    """Return the number of the sample for each index.

    In the first epoch of a run with `seed`, micro-batch k of a single process equals that of rank k.
    """
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(seed))
    by_rank = order.reshape(-1, GLOBAL_BATCH // ranks, ranks).transpose(1, 2).flatten()
    numbers = torch.empty_like(order)
    numbers[order] = by_rank
    return numbers
