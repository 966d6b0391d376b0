"""The words and names that problems are made of."""


def _split(text: str) -> tuple[str, ...]:
  return tuple(text.split())


WORDS = _split(
  """
  anchor apple arrow autumn badge bamboo barn basket beach bell berry blanket
  board bottle branch bread bridge broom bucket button cabin cable camel candle
  canoe carpet castle chair chalk cherry circle cliff clock cloud coast coin
  copper corner cotton cradle crown dagger daisy desert diamond dinner dragon
  drum eagle earth engine fabric falcon feather fence field finger flame flute
  forest fountain garden garlic gate ginger glass glove goat grape hammer
  harbor hazel helmet honey horse hunter island ivory jacket jungle kettle
  kitchen knife ladder lagoon lantern leaf lemon letter lily lizard magnet maple
  marble meadow melon mirror monkey mountain needle nest oasis ocean olive
  onion orange orchid oven owl paddle palace paper parrot pebble pencil pepper
  piano pillow pirate planet pocket pond potato prairie pumpkin quartz queen
  quilt rabbit raven ribbon river road rocket rope saddle salmon sand scarf
  school shadow shell silver snow soap spider spoon spring square stone storm
  summer sunset table teapot temple thunder tiger timber tower trumpet tulip
  tunnel turtle umbrella valley velvet village violin wagon walnut water whale
  willow window winter yard zebra
  """
)
"""Nouns, each of them once."""

NAMES = _split(
  """
  Adam Alice Anna Ben Carla Clara David Diana Elena Emma Felix Frank Grace Greta
  Hanna Henry Ida Ivan Jack Julia Karl Kate Leo Lina Lucy Mark Mia Nina Noah
  Olga Oscar Paul Peter Rosa Ruth Sam Sara Simon Tom Vera
  """
)
"""First names."""

OBJECTS = _split(
  """
  apples balls beads books boxes buttons cakes candles cards coins cups eggs
  flowers lemons marbles nuts pears pencils plums shells stamps stones toys
  """
)
"""What is counted in stories."""
