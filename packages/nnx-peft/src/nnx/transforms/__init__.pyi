from .errors import RecipeError as RecipeError
from .operations import lora as lora
from .operations import low_rank as low_rank
from .optimizers import check_optimizer as check_optimizer
from .recipe import TransformOp as TransformOp
from .recipe import TransformRecipe as TransformRecipe
