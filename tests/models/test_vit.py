import torch

from models.vit import ViT


def test_shapes_and_units() -> None:
    model = ViT((1, 8, 8), 10, patch_size=2, width=32, depth=3, num_heads=4)
    assert model(torch.randn(5, 1, 8, 8)).shape == (5, 10)
    assert model.position_embedding.shape == (16, 32)
    assert model.fsdp_units == list(model.blocks)
    assert ViT((3, 8, 12), 10, patch_size=4, width=32, num_heads=4)(torch.randn(5, 3, 8, 12)).shape == (5, 10)


def test_every_patch_and_its_position_matter() -> None:
    torch.manual_seed(0)
    model = ViT((1, 8, 8), 10, width=32, num_heads=4).eval()
    image = torch.randn(1, 1, 8, 8)
    logits = model(image)
    for row, column in ((0, 0), (0, 7), (7, 0), (7, 7)):
        changed = image.clone()
        changed[0, 0, row, column] += 1
        assert (model(changed) - logits).abs().max() > 1e-5
    turned = image.roll(4, dims=3)  # the same patches in other places
    assert (model(turned) - logits).abs().max() > 1e-5
