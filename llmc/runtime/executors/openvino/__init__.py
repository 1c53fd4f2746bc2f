"""Common parts of the OpenVINO executors: opening models, paged cache blocks, and slots over blocks."""

from llmc.runtime.executors.openvino import importing as importing  # before any module here imports openvino
