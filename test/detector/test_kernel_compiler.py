"""CUDA compilers: the real NVRTC and nvcc where they are installed, and what is said without."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from perception_rt.core.errors import BackendError, UnavailableError
from perception_rt.detector import kernel_compiler
from perception_rt.detector.gpu_preprocess import KERNELS, SOURCE_NAME, kernel_source
from perception_rt.detector.kernel_compiler import Cubin, Nvcc, Nvrtc, compile_cubin, compilers

# Thor has another number in CUDA 12 than in CUDA 13.
DEVICES = {
    "Orin": (87,),
    "Thor": (110, 101),
    "Ampere desktop": (86,),
    "Ada desktop": (89,),
    "Blackwell desktop": (120,),
}
ELF_MACHINE_CUDA = 190
BAD_SOURCE = 'extern "C" __global__ void f() { no_such_name(); }\n'


class FakeCompiler:
    def __init__(self, name, version, sms):
        self.name, self.version, self.sms = name, version, sms

    def compile(self, source, file_name, sm):
        return f"{source} {file_name} {sm}".encode()


@pytest.fixture
def installed(monkeypatch):
    """Puts other compilers in place of the machine's."""

    def install(*fakes):
        monkeypatch.setattr(kernel_compiler, "compilers", lambda: iter(fakes))

    return install


@pytest.fixture(scope="module")
def nvrtc():
    found = [compiler for compiler in compilers() if isinstance(compiler, Nvrtc)]
    if not found:
        reason = "no NVRTC in this environment"
        if Path(sys.prefix).name == ".venv-gpu":
            pytest.fail(f"{reason}: run scripts/setup_gpu_checks.sh")
        pytest.skip(reason)
    return found[0]


@pytest.fixture(scope="module")
def nvcc():
    found = [compiler for compiler in compilers() if isinstance(compiler, Nvcc)]
    if not found:
        pytest.skip("no nvcc on this machine")
    return found[0]


def assert_is_cubin(data):
    assert data[:4] == b"\x7fELF"
    assert int.from_bytes(data[18:20], "little") == ELF_MACHINE_CUDA
    for spec in KERNELS.values():
        assert spec.entry.encode() in data


@pytest.mark.gpu_checks
@pytest.mark.parametrize("device", DEVICES)
def test_nvrtc_compiles_the_preprocess(nvrtc, device):
    known = [sm for sm in DEVICES[device] if sm in nvrtc.sms]
    if not known:
        pytest.skip(f"{nvrtc.name} does not know the SM of {device}: {DEVICES[device]}")
    assert_is_cubin(nvrtc.compile(kernel_source(), SOURCE_NAME, known[0]))


@pytest.mark.gpu_checks
def test_nvrtc_says_what_is_wrong_with_a_source_and_works_again(nvrtc):
    for _ in range(3):
        with pytest.raises(BackendError) as caught:
            nvrtc.compile(BAD_SOURCE, "bad.cu", 87)
        assert str(caught.value).startswith(f"{nvrtc.name} does not compile bad.cu for SM 87: ")
        assert 'bad.cu(1): error: identifier "no_such_name" is undefined' in str(caught.value)
        assert "\n" not in str(caught.value)
        assert nvrtc.compile(kernel_source(), SOURCE_NAME, 87)[:4] == b"\x7fELF"


@pytest.mark.gpu_checks
def test_the_environments_own_compiler_is_preferred(nvrtc):
    found = compile_cubin(kernel_source(), SOURCE_NAME, 87)
    assert found.compiler == nvrtc.name
    assert_is_cubin(found.data)


@pytest.mark.gpu_checks
def test_nvcc_compiles_the_preprocess(nvcc):
    assert_is_cubin(nvcc.compile(kernel_source(), SOURCE_NAME, 87))
    with pytest.raises(BackendError, match='error: identifier "no_such_name" is undefined'):
        nvcc.compile(BAD_SOURCE, "bad.cu", 87)


def test_the_first_compiler_that_knows_the_sm_is_taken(installed):
    installed(
        FakeCompiler("NVRTC 12.9", (12, 9), (87, 101)),
        FakeCompiler("NVRTC 13.0", (13, 0), (87, 110)),
    )
    assert compile_cubin("s", "a.cu", 87) == Cubin(b"s a.cu 87", "NVRTC 12.9")
    assert compile_cubin("s", "a.cu", 110).compiler == "NVRTC 13.0"


def test_no_compiler_later_than_the_driver_is_taken(installed):
    installed(
        FakeCompiler("NVRTC 13.0", (13, 0), (87, 110)),
        FakeCompiler("nvcc 12.6", (12, 6), (87,)),
    )
    assert compile_cubin("s", "a.cu", 87, cuda_major=12).compiler == "nvcc 12.6"
    assert compile_cubin("s", "a.cu", 87, cuda_major=13).compiler == "NVRTC 13.0"
    with pytest.raises(UnavailableError) as caught:
        compile_cubin("s", "a.cu", 110, cuda_major=12)
    assert "no CUDA compiler for a.cu for SM 110 and CUDA 12" in str(caught.value)
    assert "found: NVRTC 13.0 (SM 87, 110); nvcc 12.6 (SM 87): install" in str(caught.value)


def test_no_compiler_at_all_names_the_packages(installed):
    installed()
    with pytest.raises(UnavailableError) as caught:
        compile_cubin("s", "letterbox.cu", 87)
    assert "no CUDA compiler for letterbox.cu for SM 87; found: none" in str(caught.value)
    for package in ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc ", "nvidia-jetpack"):
        assert package in str(caught.value)


@pytest.fixture
def bare_machine(monkeypatch, tmp_path):
    """A machine without CUDA: what a test puts into the returned folder is its toolkit."""
    toolkit = tmp_path / "cuda"
    (toolkit / "bin").mkdir(parents=True)
    (toolkit / "lib64").mkdir()
    monkeypatch.setattr(kernel_compiler, "_TOOLKIT", toolkit)
    monkeypatch.setattr(kernel_compiler, "_LOADER_NAMES", ())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if shutil.which("nvcc"):
        pytest.skip("nvcc lies in /usr/bin here")
    return toolkit


def install_nvcc(toolkit, script):
    path = toolkit / "bin" / "nvcc"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)


SAYS_ITS_VERSION = """
case $1 in
  --version) echo 'Cuda compilation tools, release 12.6, V12.6.68'; exit ;;
  --list-gpu-code) printf 'sm_75\\nsm_87\\nsm_90a\\n'; exit ;;
esac
"""


def test_nvcc_of_the_toolkit_is_found_though_not_on_path(bare_machine):
    install_nvcc(bare_machine, SAYS_ITS_VERSION + 'echo "$@" >"$5"; cat "$6" >>"$5"')
    (compiler,) = compilers()
    assert (compiler.name, compiler.version, compiler.sms) == ("nvcc 12.6", (12, 6), (75, 87))
    data = compiler.compile("the source", "k.cu", 87).decode()
    arguments, source = data.split("\n")
    assert arguments.startswith("--gpu-architecture=sm_87 -std=c++14 --cubin -o ")
    assert arguments.endswith("/out.cubin k.cu")
    assert source == "the source"
    assert not Path(arguments.split()[4]).parent.exists()


@pytest.mark.parametrize(
    ("end", "part"),
    [
        ("echo 'k.cu(3): error: bad thing' >&2; echo 1 error >&2; exit 2", "k.cu(3): error: bad"),
        ("exit 1", "no reason"),
        ("exit 0", "no reason"),  # and no output file
        ('rm -f -- "$0"; kill -9 $$', "no reason"),
    ],
)
def test_nvcc_that_fails_is_a_backend_error(bare_machine, end, part):
    install_nvcc(bare_machine, SAYS_ITS_VERSION + end)
    (compiler,) = compilers()
    with pytest.raises(BackendError, match="does not compile") as caught:
        compiler.compile("x", "k.cu", 87)
    assert str(caught.value).startswith("nvcc 12.6 does not compile k.cu for SM 87: ")
    assert part in str(caught.value)


@pytest.mark.parametrize("script", ["exit 1", "echo not a compiler", "kill -9 $$"])
def test_a_program_that_is_no_nvcc_is_no_compiler(bare_machine, script):
    install_nvcc(bare_machine, script)
    assert list(compilers()) == []


def test_a_file_that_is_no_nvrtc_is_passed_over(bare_machine):
    """Cut off, and a library of something else."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    libm = next(line.split()[-1] for line in maps if "/libm.so" in line or "/libm-" in line)
    (bare_machine / "lib64" / "libnvrtc.so.12").write_bytes(b"\x7fELF")
    (bare_machine / "lib64" / "libnvrtc.so.13").symlink_to(libm)
    assert list(compilers()) == []
