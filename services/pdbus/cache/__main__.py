from pdbus.cache.service import CacheService
from pdbus.cache.settings import CacheSettings
from pdbus.runtime import run

if __name__ == "__main__":
    raise SystemExit(run(CacheService, CacheSettings))
