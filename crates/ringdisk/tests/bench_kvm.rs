//! `bench/kvm/run`, as far as it runs without KVM: the command lines that it would use.

use std::path::Path;
use std::process::Command;

use ringdisk_testkit::process::{Finished, command, run};

const PROGRAM: &str = env!("CARGO_BIN_EXE_ringdisk");

fn kvm(words: &[&str]) -> Finished {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/kvm/run");
    run(command(&[&[script.to_str().expect("a path")], words].concat()))
}

#[test]
fn a_dry_run_shows_each_way_and_what_is_missing() {
    let directory = tempfile::tempdir().expect("a directory");
    let image = directory.path().join("disk.raw");
    std::fs::write(&image, [0; 4096]).expect("an image");
    let image = image.to_str().expect("a path");

    let finished = kvm(&["--dry-run", "--device", image]);

    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    let text = &finished.stdout;
    let wanted = [
        "iothread-vq-mapping",
        "num-queues=8 -smp 8",
        "--numjobs=8",
        "--accel off",
        "--accel require --accel-workers 1",
        "--accel require --accel-workers 2",
        "--accel require --accel-workers 4",
    ];
    for wanted in wanted {
        assert!(text.contains(wanted), "nothing of {wanted}: {text}");
    }
    if !Path::new("/dev/vhost-blk").exists() {
        assert!(text.contains("# missing here: ") && text.contains("/dev/vhost-blk"), "{text}");
    }
    // The words for our own server are words that it knows.
    let ours: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split(' ').collect())
        .filter(|words: &Vec<&str>| words.len() > 1 && words[1] == "serve")
        .collect();
    // Our own threads, and workers as far as there are queues for them.
    assert_eq!(ours.len(), 4 + (1 + 2 + 3 + 3), "{text}");
    for words in ours {
        let known = run(Command::new(PROGRAM).args(&words[1..]).arg("--help"));
        assert_eq!(known.code(), Some(0), "{words:?}: {}", known.output());
    }
}

#[test]
fn ways_that_are_none_are_refused_with_those_there_are() {
    let finished = kvm(&["--dry-run", "--ways", "foo"]);

    assert_eq!(finished.code(), Some(2), "{}", finished.output());
    assert!(finished.stderr.contains("no way 'foo'"), "{}", finished.output());
    assert!(finished.stderr.contains("module-4"), "{}", finished.output());
}
