"""Where what is seen of a run goes: the terminal, the log, TensorBoard, MLflow, W&B.

Give them to ``RexTrainer(loggers=[...])``. They live in the driver's process, so that a job has one tracker run,
however many ranks train and however often they are started again.
"""

from rex_ray.loggers.decision_log import DecisionLog
from rex_ray.loggers.mlflow_logger import MLflowLogger
from rex_ray.loggers.progress_line import ProgressLine
from rex_ray.loggers.tensorboard_logger import TensorBoardLogger
from rex_ray.loggers.wandb_logger import WandbLogger

__all__ = ["DecisionLog", "MLflowLogger", "ProgressLine", "TensorBoardLogger", "WandbLogger"]
