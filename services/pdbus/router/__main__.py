from pdbus.router.service import RouterService
from pdbus.router.settings import RouterSettings
from pdbus.runtime import run

if __name__ == "__main__":
    raise SystemExit(run(RouterService, RouterSettings))
