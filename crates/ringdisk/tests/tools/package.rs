//! The Debian packages: built, installed in an empty root, run, and removed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use ringdisk_testkit::limits::needs_root;
use ringdisk_testkit::mount::{scratch, text};
use ringdisk_testkit::process::{command, ok};

use crate::common::program;

/// Builds the packages of the program under test. Gives the paths, program first.
fn build(into: &Path) -> Vec<PathBuf> {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let script = project.join("packaging/debian/build");
    let words = [text(&script), "--program", &program(), text(into)];
    ok(command(&words)).lines().map(PathBuf::from).collect()
}

/// dpkg on a root that has nothing, not even a shell: scripts run outside of it.
fn dpkg(root: &Path, words: &[&str]) -> String {
    let at = format!("--root={}", root.display());
    let first = ["dpkg", &at, "--force-depends", "--force-script-chrootless", "--no-debsig"];
    ok(command(&[&first[..], words].concat()))
}

/// All files below a directory, without those of dpkg itself.
fn files(root: &Path) -> Vec<String> {
    let found = ok(command(&["find", text(root), "(", "-type", "f", "-o", "-type", "l", ")"]));
    let found = found.lines().filter_map(|line| line.strip_prefix(text(root)));
    found.filter(|path| !path.starts_with("/var/")).map(str::to_owned).collect()
}

#[test]
fn the_packages_are_built_installed_in_an_empty_root_and_removed() {
    if !needs_root() {
        return;
    }
    let directory = scratch();
    let root = directory.path().join("root");
    for part in ["updates", "info"] {
        fs::create_dir_all(root.join("var/lib/dpkg").join(part)).expect("mkdir");
    }
    fs::write(root.join("var/lib/dpkg/status"), "").expect("write");
    let packages = build(directory.path());
    assert_eq!(packages.len(), 2, "{packages:?}");
    dpkg(&root, &["-i", text(&packages[0]), text(&packages[1])]);
    assert_eq!(dpkg(&root, &["--verify"]), "", "files differ from what the package says");

    let installed = root.join("usr/bin/ringdisk");
    let version = ok(command(&[text(&installed), "--version"]));
    assert_eq!(version, ok(command(&[&program(), "--version"])));
    // It works: no image is too small for that.
    let image = directory.path().join("a.qcow2");
    ok(command(&[text(&installed), "create", "-f", "qcow2", text(&image), "1M"]));
    ok(command(&[text(&installed), "check", text(&image)]));
    let symbols = ok(command(&["find", text(&root.join("usr/lib/debug")), "-name", "*.debug"]));
    assert_eq!(symbols.lines().count(), 1, "{symbols}");
    let len = |path: &Path| fs::metadata(path).expect("it is there").len();
    assert!(len(&installed) <= len(program().as_ref()));

    let there = files(&root);
    for file in [
        "/usr/share/man/man1/ringdisk.1.gz",
        "/usr/share/man/man1/ringdisk-mount.1.gz",
        "/usr/share/bash-completion/completions/ringdisk",
        "/usr/share/zsh/vendor-completions/_ringdisk",
        "/usr/share/fish/vendor_completions.d/ringdisk.fish",
        "/usr/lib/systemd/system/ringdisk@.service",
        "/usr/lib/systemd/system/ringdisk-vm@.service",
        "/usr/lib/sysusers.d/ringdisk.conf",
        "/usr/share/doc/ringdisk/copyright",
        "/usr/sbin/mount.fuse.ringdisk",
    ] {
        assert!(there.iter().any(|it| it == file), "no {file} among {there:?}");
    }
    let helper = fs::canonicalize(root.join("usr/sbin/mount.fuse.ringdisk")).expect("a link");
    assert_eq!(helper, fs::canonicalize(&installed).expect("it is there"));
    let etc = root.join("etc/ringdisk");
    assert!(etc.is_dir(), "no directory for configurations");

    // Again, as an upgrade; then a configuration of the user outlives all of it.
    dpkg(&root, &["-i", text(&packages[0])]);
    fs::write(etc.join("mine.toml"), "image = \"/srv/a\"\n").expect("write");
    dpkg(&root, &["--purge", "ringdisk-dbgsym", "ringdisk"]);
    assert_eq!(files(&root), ["/etc/ringdisk/mine.toml"]);
}

#[test]
fn what_is_no_program_makes_no_package() {
    let directory = scratch();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/debian/build");
    let text_file = directory.path().join("text");
    fs::write(&text_file, "#!/bin/sh\n").expect("write");
    fs::set_permissions(&text_file, fs::Permissions::from_mode(0o755)).expect("chmod");
    for (words, said) in [
        (&["--program", "none"][..], "is no program"),
        (&["--program", "text"], "has no build id"),
        (&["--option"], "no option --option"),
    ] {
        let mut build = command(&[&[text(&script)], words].concat());
        let finished = ringdisk_testkit::process::run(build.current_dir(directory.path()));
        assert!(!finished.status.success() && finished.stderr.contains(said), "{finished:?}");
    }
    let left = fs::read_dir(directory.path()).expect("read").count();
    assert_eq!(left, 1, "only the file that was no program");
}
