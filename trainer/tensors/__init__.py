"""Operations on tensors: bitwise comparison, shards, nested structures, random generators."""
