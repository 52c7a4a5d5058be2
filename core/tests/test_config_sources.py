"""Precedence, spelling and strictness of configuration sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from enginectl.config import EngineConfig, ServerConfig
from enginectl.config_sources import Resolved, engine_config, field_types, resolve
from enginectl.errors import ConfigError, PluginError, UnsupportedError

INSTALLED = ["fcfs", "torch", "ngram", "draft", "prefix-cache", "triton", "otel"]


def resolved(
    flags: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    toml: Path | None = None,
    plugin_flags: dict[str, dict[str, str]] | None = None,
) -> Resolved:
    return resolve(
        {"model": "m", **(flags or {})},
        environ=environ or {},
        config_file=toml,
        plugin_flags=plugin_flags,
        installed=INSTALLED,
    )


@pytest.fixture
def write_toml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "serve.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


class TestPrecedence:
    def test_flag_over_variable_over_file_over_default(self, write_toml: Any) -> None:
        toml = write_toml("max-num-seqs = 1\nblock_size = 32\nmax-model-len = 300\nport = 1\n")
        environ = {"ENGINECTL_MAX_NUM_SEQS": "2", "ENGINECTL_BLOCK_SIZE": "64"}
        answer = resolved({"max_num_seqs": "3"}, environ, toml)
        assert (answer.engine.max_num_seqs, answer.engine.block_size) == (3, 64)
        assert (answer.engine.max_model_len, answer.server.port) == (300, 1)
        assert answer.engine.gpu_memory_utilization == 0.9
        assert answer.origins["max_num_seqs"] == "--max-num-seqs"
        assert answer.origins["block_size"] == "environment variable ENGINECTL_BLOCK_SIZE"
        assert answer.origins["max_model_len"] == str(toml)
        assert "gpu_memory_utilization" not in answer.origins

    def test_plugin_options_are_merged_key_by_key_whatever_the_spelling(self, write_toml: Any) -> None:
        toml = write_toml("[plugins.prefix-cache]\na-b = 1\nc = 1\nd = 1\n")
        environ = {"ENGINECTL_PLUGIN_PREFIX_CACHE__A_B": "2", "ENGINECTL_PLUGIN_PREFIX_CACHE__C": "2"}
        answer = resolved({}, environ, toml, {"prefix-cache": {"a-b": "3"}})
        assert answer.engine.plugin_options == {"prefix-cache": {"a_b": "3", "c": "2", "d": 1}}
        assert answer.origins["plugins.prefix-cache.a_b"] == "--prefix-cache.a-b"

    def test_roles_are_merged_role_by_role(self, write_toml: Any) -> None:
        toml = write_toml('[roles]\nattention = "a"\nkv-allocator = "a"\nsampler = "a"\n')
        answer = resolved({"attention": "c"}, {"ENGINECTL_SAMPLER": "b"}, toml)
        assert answer.engine.roles == {"attention": "c", "kv_allocator": "a", "sampler": "b"}

    def test_the_file_may_be_named_by_a_variable(self, write_toml: Any) -> None:
        assert resolved({}, {"ENGINECTL_CONFIG": str(write_toml("seed = 7\n"))}).engine.seed == 7

    def test_the_model_may_come_from_anywhere(self, write_toml: Any) -> None:
        toml = write_toml('model = "from-file"\n')
        assert resolve({}, environ={}, config_file=toml, installed=INSTALLED).engine.model == "from-file"
        with pytest.raises(ConfigError, match="no model: give MODEL"):
            resolve({}, environ={}, installed=INSTALLED)


class TestValues:
    def test_lists_in_variables_are_comma_separated(self) -> None:
        answer = resolved({}, {"ENGINECTL_PLUGINS": "ngram, triton", "ENGINECTL_API_KEY": "a,b"})
        assert answer.engine.plugins == ("ngram", "triton")
        assert answer.server.api_key == ("a", "b")

    def test_a_key_given_by_flag_may_contain_a_comma(self) -> None:
        answer = resolved({"api_key": ["a,b", "c"], "plugins": ["ngram,triton", "torch", ""]})
        assert answer.server.api_key == ("a,b", "c")
        assert answer.engine.plugins == ("ngram", "triton", "torch")

    @pytest.mark.parametrize(
        ("flags", "environ"),
        [
            ({"api_key": [""]}, {}),
            ({"api_key": ["a", " "]}, {}),
            ({}, {"ENGINECTL_API_KEY": ""}),
            ({"admin_api_key": ""}, {}),
            ({}, {"ENGINECTL_ADMIN_API_KEY": ""}),
        ],
    )
    def test_an_empty_key_does_not_leave_the_server_open(self, flags: dict[str, Any], environ: dict[str, str]) -> None:
        """Law 16: `--api-key "$KEY"` with KEY unset served without keys, and nobody was told."""
        with pytest.raises(ConfigError, match="an API key is empty"):
            resolved(flags, environ)

    @pytest.mark.parametrize(("text", "num_bytes"), [("4GiB", 4 << 30), ("1048576", 1 << 20), ("auto", None)])
    def test_sizes_have_units(self, text: str, num_bytes: int | None) -> None:
        assert resolved({"kv_cache_memory_bytes": text}).engine.kv_cache_memory_bytes == num_bytes

    def test_auto_leaves_a_value_open(self, write_toml: Any) -> None:
        toml = write_toml("max-model-len = 100\n")
        assert resolved({"max_model_len": "auto"}, {}, toml).engine.max_model_len is None

    @pytest.mark.parametrize(("text", "dtype"), [("half", "float16"), ("bf16", "bfloat16"), ("float", "float32")])
    def test_synonyms_of_dtypes(self, text: str, dtype: str) -> None:
        assert resolved({"dtype": text}).engine.dtype == dtype

    @pytest.mark.parametrize(
        "value",
        [
            ["a=/x", "b=/y=z"],
            ["a=/x,b=/y=z"],
            ['{"a": "/x", "b": "/y=z"}'],
            ['{"name": "a", "path": "/x"}', "b=/y=z"],
            ['[{"name": "a", "path": "/x"}, {"name": "b", "path": "/y=z"}]'],
        ],
    )
    def test_lora_modules_in_every_spelling(self, value: list[str]) -> None:
        answer = resolved({"enable_lora": True, "lora_modules": value})
        assert answer.engine.lora_modules == {"a": "/x", "b": "/y=z"}

    def test_toml_has_tables_for_what_flags_spell_as_text(self, write_toml: Any) -> None:
        toml = write_toml(
            'enable-lora = true\nstructured-outputs-config.backend = "xgrammar"\nkv-cache-memory-bytes = "2GiB"\n'
            '[lora-modules]\n"support" = "/x"\n[speculative-config]\nmethod = "ngram"\nnum-speculative-tokens = 3\n'
        )
        engine = resolved({}, {}, toml).engine
        assert engine.lora_modules == {"support": "/x"}
        assert engine.roles == {"grammar": "xgrammar"}
        assert engine.kv_cache_memory_bytes == 2 << 30
        assert engine.plugin_options == {"ngram": {"num_speculative_tokens": 3}}

    def test_plugins_and_their_sections_in_one_file(self, write_toml: Any) -> None:
        toml = write_toml('[plugins]\nrequire = ["ngram"]\n[plugins.ngram]\nprompt-lookup-max = 5\n')
        engine = resolved({}, {}, toml).engine
        assert engine.plugins == ("ngram",)
        assert engine.plugin_options == {"ngram": {"prompt_lookup_max": 5}}
        assert resolved({}, {}, write_toml('plugins = ["ngram"]\n')).engine.plugins == ("ngram",)

    def test_variables_kubernetes_sets_for_a_service_of_our_name_are_not_ours(self) -> None:
        environ = {
            "ENGINECTL_PORT": "tcp://10.0.0.7:8000",
            "ENGINECTL_SERVICE_HOST": "10.0.0.7",
            "ENGINECTL_SERVICE_PORT_HTTP": "8000",
            "ENGINECTL_PORT_8000_TCP_ADDR": "10.0.0.7",
        }
        assert resolved({}, environ).server.port == 8000
        assert resolved({}, {"ENGINECTL_PORT": "9000"}).server.port == 9000


class TestAliases:
    def test_speculative_config_is_a_plugin_and_its_section(self) -> None:
        text = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":2,"prompt_lookup_max":5}'
        answer = resolved({"speculative_config": text, "plugins": ["triton"]})
        assert answer.engine.plugins == ("triton", "ngram")
        options = {"num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
        assert answer.engine.plugin_options == {"ngram": options}
        assert answer.engine.speculative_config == {"method": "ngram"}
        assert answer.origins["plugins.ngram.prompt_lookup_min"] == "--speculative-config"

    @pytest.mark.parametrize(
        "text", ['{"method": "draft_model", "model": "/d"}', '{"method": "draft", "model": "/d"}', '{"model": "/d"}']
    )
    def test_a_draft_model(self, text: str) -> None:
        engine = resolved({"speculative_config": text}).engine
        assert engine.plugins == ("draft",)
        assert engine.plugin_options == {"draft": {"model": "/d"}}

    def test_a_traces_endpoint_is_a_plugin_and_its_section(self) -> None:
        answer = resolved({"otlp_traces_endpoint": "http://c"})
        assert answer.engine.plugins == ("otel",)
        assert answer.engine.plugin_options == {"otel": {"endpoint": "http://c"}}
        assert answer.engine.otlp_traces_endpoint is None

    def test_structured_outputs_backend_is_the_grammar_role(self) -> None:
        assert resolved({"structured_outputs_config": "xgrammar"}).engine.roles == {"grammar": "xgrammar"}
        assert resolved({"structured_outputs_config": '{"backend": "xgrammar"}'}).engine.roles == {
            "grammar": "xgrammar"
        }
        assert resolved({"structured_outputs_config": "auto"}).engine.roles == {}

    def test_plugin_names_take_the_installed_spelling(self) -> None:
        assert resolved({"plugins": ["prefix_cache"]}).engine.plugins == ("prefix-cache",)

    def test_contradicting_sections_are_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"--speculative-config: k is 4, and '5' in --ngram.k; give it once"):
            resolved({"speculative_config": '{"method": "ngram", "k": 4}'}, plugin_flags={"ngram": {"k": "5"}})

    @pytest.mark.parametrize(
        ("name", "package"),
        [
            ("ngram", "enginectl-spec-ngram"),
            ("draft", "enginectl-spec-draft"),
            ("flashinfer", "enginectl-attention-flashinfer"),
            ("prefix_cache", "enginectl-prefix-cache"),
        ],
    )
    def test_a_plugin_that_is_not_installed_names_its_package(self, name: str, package: str) -> None:
        with pytest.raises(PluginError, match=f"pip install {package}"):
            resolve({"model": "m", "plugins": [name]}, environ={}, installed=["fcfs"])
        with pytest.raises(PluginError, match=f"pip install {package}"):
            resolve({"model": "m"}, plugin_flags={name: {"k": "1"}}, environ={}, installed=["fcfs"])

    def test_a_speculative_method_that_is_not_installed_names_its_package(self) -> None:
        with pytest.raises(
            PluginError, match=r"--speculative-config: no plugin named 'ngram'.*pip install enginectl-spec-ngram"
        ):
            resolve({"model": "m", "speculative_config": '{"method": "ngram"}'}, environ={}, installed=["fcfs"])


class TestErrors:
    @pytest.mark.parametrize(
        ("environ", "message"),
        [
            (
                {"ENGINECTL_MAX_MODEL_LENGTH": "1"},
                "ENGINECTL_MAX_MODEL_LENGTH: unknown variable 'max_model_length'; did you mean 'max_model_len'",
            ),
            (
                {"ENGINECTL_MAX_MODEL_LEN": "many"},
                "ENGINECTL_MAX_MODEL_LEN: max_model_len is 'many'; allowed: a whole number, or auto",
            ),
            ({"ENGINECTL_ENABLE_LORA": "maybe"}, "enable_lora is 'maybe'; allowed: true or false"),
            ({"ENGINECTL_PLUGIN_NGRAM": "1"}, "ENGINECTL_PLUGIN_<NAME>__<KEY>"),
            (
                {"ENGINECTL_PLUGIN_NGARM__K": "1"},
                "ENGINECTL_PLUGIN_NGARM__K: no plugin named 'ngarm'; did you mean 'ngram'",
            ),
            ({"ENGINECTL_KV_CACHE_MEMORY_BYTES": "4 pounds"}, "ENGINECTL_KV_CACHE_MEMORY_BYTES: kv_cache_memory_bytes"),
        ],
    )
    def test_variables(self, environ: dict[str, str], message: str) -> None:
        with pytest.raises((ConfigError, PluginError)) as caught:
            resolved({}, environ)
        assert message in str(caught.value)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("max-modle-len = 5\n", "unknown key 'max-modle-len'; did you mean 'max_model_len'"),
            ('max-model-len = "5"\n', "max_model_len is '5'; allowed: a whole number"),
            ("enable-lora = 1\n", "enable_lora is 1; allowed: true or false"),
            ('plugins = "ngram"\n', "plugins is 'ngram'; allowed: a list of text"),
            ("[roles]\natention = 'x'\n", "unknown role 'atention'; did you mean 'attention'"),
            ("[roles]\nattention = 3\n", "roles.attention is 3; allowed: a provider's name"),
            ("[plugins.ngarm]\nk = 1\n", "[plugins.ngarm]: no plugin named 'ngarm'; did you mean 'ngram'"),
            ("[plugins]\nngram = 1\n", "ngram is 1; allowed: a table"),
            ("x = \n", "not a TOML file"),
            ("structured-outputs-config = {backnd = 'x'}\n", "did you mean 'backend'"),
        ],
    )
    def test_files(self, write_toml: Any, text: str, message: str) -> None:
        path = write_toml(text)
        with pytest.raises((ConfigError, PluginError)) as caught:
            resolved({}, {}, path)
        assert message in str(caught.value)
        assert str(path) in str(caught.value)

    def test_a_file_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"missing.toml: cannot be read: No such file"):
            resolved({}, {}, tmp_path / "missing.toml")

    @pytest.mark.parametrize(
        ("name", "value", "allowed"),
        [
            ("block_size", "24", "a power of two from 1 to 256"),
            ("block_size", "512", "a power of two from 1 to 256"),
            ("gpu_memory_utilization", "1.5", "more than 0, at most 1"),
            ("gpu_memory_utilization", "nan", "more than 0, at most 1"),
            ("max_num_seqs", "0", "1 to 65536"),
            ("dtype", "floot16", "auto, float32, bfloat16, float16; did you mean"),
            ("device", "tpu", "auto, cpu, cuda, or cuda:N"),
            ("overlap_depth", "2", "0, 1, or auto"),
            ("prefix_caching_hash_algo", "md5", "sha256"),
            ("num_gpu_blocks_override", "1", "2 or more"),
            ("port", "70000", "0 (any free port) to 65535"),
            ("step_timeout_s", "0", "more than 0"),
            ("log_level", "loud", "debug, info, warning, error"),
            ("seed", "-1", "a whole number from 0"),
        ],
    )
    def test_ranges(self, name: str, value: str, allowed: str) -> None:
        with pytest.raises(ConfigError) as caught:
            resolved({name: value})
        assert str(caught.value).startswith(f"--{name.replace('_', '-')}: {name} is ")
        assert allowed in str(caught.value)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"lora_modules": ["a=/x"]}, "enable_lora is off"),
            ({"enable_lora": True, "lora_modules": ["a=/x", "a=/y"]}, "'a' is given twice"),
            ({"enable_lora": True, "lora_modules": ["/x"]}, "allowed: NAME=PATH"),
            ({"max_loras": "8", "max_cpu_loras": "4"}, "less than max_loras"),
            (
                {"enable_chunked_prefill": False, "max_num_batched_tokens": "10", "max_model_len": "20"},
                "must fit one step",
            ),
            ({"scheduling_policy": "priority", "scheduler": "fcfs"}, "give one of them"),
            ({"ssl_keyfile": "k"}, "belong together"),
            ({"ssl_ca_certs": "a"}, "there is no TLS yet"),
            ({"ssl_keyfile": "k", "ssl_certfile": "c", "ssl_ca_certs": "a"}, "with both, or with neither"),
            ({"ssl_keyfile": "k", "ssl_certfile": "c", "ssl_cert_reqs": "required"}, "with both, or with neither"),
            ({"num_gpu_blocks_override": "2", "max_model_len": "33"}, "give at least 3"),
            ({"enable_auto_tool_choice": True}, "needs a tool_call_parser"),
            ({"speculative_config": "{}"}, "method is None"),
            ({"speculative_config": "ngram"}, "allowed: a JSON object"),
        ],
    )
    def test_contradictions(self, flags: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            resolved(flags)
        assert message in str(caught.value)

    @pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"])
    def test_parallelism_that_no_executor_provides_is_refused(self, name: str) -> None:
        with pytest.raises(UnsupportedError, match=f"{name} is 2: no installed executor provides it"):
            resolved({name: "2"})
        assert getattr(resolved({name: "2", "executor": "ranks"}).engine, name) == 2


class TestPythonApi:
    def test_keywords_are_fields(self) -> None:
        config = engine_config(
            "m",
            installed=INSTALLED,
            plugins=["prefix_cache"],
            max_num_seqs=4,
            speculative_config={"method": "ngram", "k": 1},
        )
        assert config.plugins == ("prefix-cache", "ngram")
        assert config.plugin_options == {"ngram": {"k": 1}}
        assert config.max_num_seqs == 4

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"max_num_seq": 4}, "unknown option 'max_num_seq'; did you mean 'max_num_seqs'"),
            ({"max_num_seqs": "4"}, "Engine(max_num_seqs=…): max_num_seqs is '4'; allowed: a whole number"),
            ({"port": 1}, "unknown option 'port'"),
            ({"block_size": 3}, "a power of two"),
            ({"roles": {"x": "y"}}, "unknown role 'x'"),
        ],
    )
    def test_wrong_keywords(self, values: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as caught:
            engine_config("m", installed=INSTALLED, **values)
        assert message in str(caught.value)


def test_no_two_structs_share_a_key() -> None:
    assert not set(EngineConfig.__struct_fields__) & set(ServerConfig.__struct_fields__)
    assert {"log_level", "log_format"} <= set(field_types())
