"""Recurrent states of Mamba and linear attention: one slot holds a checkpoint of all layers."""
