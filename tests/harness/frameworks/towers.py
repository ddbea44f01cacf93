# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Tiny models with a vision tower, and batches of which some have images; all of it runs inside rank processes."""

from typing import Any

import torch
import transformers

from tests.harness.frameworks import tiny

_VISION = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIZES = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 24}
_IMAGE = 0  # the token of a part of an image, four of which are an image


def make_model(kind: str) -> Any:
    """A model with the same random weights each time: "llava", with CLIP and Llama, or "qwen2_vl"."""
    torch.manual_seed(11)
    tokens = {"image_token_id": _IMAGE, "tie_word_embeddings": False}
    if kind == "llava":
        vision = transformers.CLIPVisionConfig(**_VISION, image_size=8, patch_size=4)
        text = tiny.shape(pad_token_id=None)
        config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_seq_length=4, **tokens)
        return transformers.LlavaForConditionalGeneration(config)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1]}}
    sizes = {**tiny.shape().to_dict(), "pad_token_id": None, "model_type": "qwen2_vl_text", **rope}
    config = transformers.Qwen2VLConfig(text_config=sizes, vision_config=_SIZES, video_token_id=-1, **tokens)
    return transformers.Qwen2VLForConditionalGeneration(config)


def _images(kind: str, count: int, draw: Any = torch.randn) -> dict[str, torch.Tensor]:
    if kind == "llava":
        return {"pixel_values": draw(count, 3, 8, 8)}
    return {"pixel_values": draw(count * 16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]] * count)}


class Collator:
    """Makes batches, of which those with an image in a row have pixels."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([row["input_ids"] for row in rows])
        count = sum(row["has_image"] for row in rows)
        for row in range(count):
            tokens[row, 1:5] = _IMAGE
        batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == _IMAGE, -100)}
        if count:
            torch.manual_seed(int(tokens.sum()))
            batch |= _images(self._kind, count)
            if self._kind != "llava":
                batch["mm_token_type_ids"] = (tokens == _IMAGE).long()
        return batch


def rows(count: int) -> list[dict[str, Any]]:
    """Rows of tokens, about every fourth of which has an image."""
    draw = torch.Generator().manual_seed(5)
    images = (torch.rand(count, generator=draw) < 0.27).tolist()
    return [{**row, "has_image": image} for row, image in zip(tiny.sequences(count), images, strict=True)]


def always_run(model: Any, kind: str) -> None:
    """Let ranks without images run the tower on blank ones, and add zero times its output."""
    ran: list[bool] = []

    def add(module: Any, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if not ran:
            features = model.model.get_image_features(**_images(kind, 1, torch.zeros)).pooler_output
            inputs["inputs_embeds"] = inputs["inputs_embeds"] + 0 * torch.cat(list(features)).sum()
        ran.clear()
        return args, inputs

    tower = model.model.vision_tower if kind == "llava" else model.model.visual
    tower.register_forward_hook(lambda *_: ran.append(True))
    model.model.language_model.register_forward_pre_hook(add, with_kwargs=True)
