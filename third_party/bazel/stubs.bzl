"""Stands in for repositories that Bazel 4 would download, so that it builds without a network.

Bazel 4 has the rules for C++ and shell built in; the stubs bind them to the names under which newer
versions of Bazel load them (MODULE.bazel). The others are named by Bazel's own toolchains.
"""

def _stub_repository_impl(repository):
    for path, lines in repository.attr.files.items():
        repository.file(path, "\n".join(lines) + "\n")

_stub_repository = repository_rule(
    implementation = _stub_repository_impl,
    attrs = {"files": attr.string_list_dict()},
)

def _bind(rules):
    return ["%s = native.%s" % (rule, rule) for rule in rules]

def stub_repositories():
    _stub_repository(
        name = "rules_cc",
        files = {
            "cc/BUILD": [
                "toolchain_type(name = 'toolchain_type', visibility = ['//visibility:public'])",
            ],
            "cc/defs.bzl": _bind([
                "cc_binary",
                "cc_library",
                "cc_test",
                "cc_toolchain",
                "cc_toolchain_suite",
            ]),
        },
    )
    _stub_repository(
        name = "rules_shell",
        files = {
            "shell/BUILD": [],
            "shell/sh_test.bzl": _bind(["sh_test"]),
        },
    )
    _stub_repository(
        name = "rules_java",
        files = {
            "java/BUILD": [],
            "java/defs.bzl": _bind([
                "java_import",
                "java_runtime",
                "java_toolchain",
            ]),
        },
    )
    _stub_repository(
        name = "remote_coverage_tools",
        files = {
            "BUILD": [
                "package(default_visibility = ['//visibility:public'])",
                "filegroup(name = 'coverage_report_generator')",
            ],
        },
    )
