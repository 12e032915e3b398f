"""The adapter between torch's FSDP2 and TIDE's collectives."""
