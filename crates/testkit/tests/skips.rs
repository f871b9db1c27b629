//! What does not run is said, and counted: past the capture of the test runner, into the file that
//! `./test` reads, and by `tests/tally`.

use std::path::Path;
use std::process::Command;

use ringdisk_testkit::limits::{needs, part_needs};
use ringdisk_testkit::process::{command, ok, run};

/// Set for the process in which the tests below are asked to skip.
const INSIDE: &str = "RINGDISK_TEST_SKIPS_INSIDE";

/// Leaves itself out when it is called by `runs_of_this_program`.
#[test]
fn a_test_that_is_left_out() {
    let inside = std::env::var_os(INSIDE).is_some();
    if inside && !needs("moon", false) {
        return;
    }
    assert!(needs("sun", true), "what is there is not missed");
}

#[test]
fn a_test_that_is_left_out_in_part() {
    if std::env::var_os(INSIDE).is_some() {
        assert!(!part_needs("tide", false));
        assert!(!part_needs("tide", false), "said twice, counted once");
    }
}

#[test]
fn a_test_that_fails_after_it_was_left_out() {
    if std::env::var_os(INSIDE).is_some() {
        assert!(needs("star", false), "left out, and wrong");
    }
}

/// Runs these tests as `cargo test` would, with its header, and returns what they print. Skips go
/// to `file`.
fn runs_of_this_program(file: &Path) -> String {
    let program = std::env::current_exe().expect("a program");
    let words = ["--test-threads=2", "a_test_that_"];
    let mut again = Command::new(&program);
    again.args(words).env(INSIDE, "1").env("RINGDISK_TEST_SKIPS", file);
    let finished = run(&mut again);
    format!(
        "     Running tests/skips.rs ({})\n{}\n{}",
        program.display(),
        finished.stderr,
        finished.stdout
    )
}

fn tally(words: &[&Path]) -> Command {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/tally");
    let mut tally = Command::new("python3");
    tally.arg(script).args(words);
    tally
}

#[test]
fn a_skip_is_seen_through_the_capture_and_noted_with_the_name_of_the_test() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("skips");
    let output = runs_of_this_program(&file);
    assert!(output.contains("SKIPPED: skips::a_test_that_is_left_out: this machine has no moon\n"));
    assert!(output.contains("SKIPPED IN PART: skips::a_test_that_is_left_out_in_part: "));
    let noted = std::fs::read_to_string(&file).expect("the file");
    let fields: Vec<Vec<&str>> = noted.lines().map(|line| line.split('\t').collect()).collect();
    let find = |what: &str| fields.iter().find(|line| line[3] == what).expect(what);
    assert_eq!((find("moon")[0], find("moon")[2]), ("whole", "a_test_that_is_left_out"));
    assert_eq!((find("tide")[0], find("tide")[2]), ("part", "a_test_that_is_left_out_in_part"));
    assert!(find("moon")[1].starts_with("skips-"), "{noted}");
}

#[test]
fn a_skipped_test_is_not_counted_as_passed() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    std::fs::write(path("log"), runs_of_this_program(&path("skips"))).expect("a log");
    let words = [Path::new("add"), &path("state"), Path::new("unit"), &path("log"), &path("skips")];
    let counts = ok(tally(&words));
    // Of three: one left out, one in part (which passes), one that fails.
    assert_eq!(counts.trim(), "1 1 1");
}

#[test]
fn a_skip_over_two_transports_is_counted_for_each() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let run = |transport: &str, skip: &str| {
        format!(
            "== a ({transport})\ntest one ... ok\ntest two ... ok\n\
             test result: ok. 2 passed; 0 failed; 0 ignored\n{skip}"
        )
    };
    let skip = "@skip\twhole\ta-0123456789abcdef\tone\tmoon\n";
    let log = [run("fuse", skip), run("uring", skip), run("zero-copy", "")].concat();
    std::fs::write(path("log"), log).expect("a log");
    let words = [Path::new("add"), &path("state"), Path::new("vm"), &path("log"), &path("none")];
    assert_eq!(ok(tally(&words)).trim(), "4 0 2");
}

#[test]
fn what_a_machine_runs_again_is_counted_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let one = "== a (uring)\ntest one ... ok\ntest two ... FAILED\n\
               @skip\twhole\ta-0123456789abcdef\tone\tmoon\n\
               test result: FAILED. 1 passed; 1 failed; 0 ignored\n";
    let all = "== a (uring)\ntest one ... ok\ntest two ... ok\n\
               test result: ok. 2 passed; 0 failed; 0 ignored\n";
    let log = [one, "vm: the job begins anew: the emulator made a mistake:\n", all].concat();
    std::fs::write(path("log"), log).expect("a log");
    let words = [Path::new("add"), &path("state"), Path::new("vm"), &path("log"), &path("none")];
    assert_eq!(ok(tally(&words)).trim(), "2 0 0");
}

#[test]
fn what_another_test_runs_is_no_skip() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let counts = |reason: &str| {
        let log = format!(
            "test one ... ignored, {reason}\ntest result: ok. 0 passed; 0 failed; 1 ignored\n"
        );
        std::fs::write(path("log"), log).expect("a log");
        let words =
            [Path::new("add"), &path("state"), Path::new("unit"), &path("log"), &path("none")];
        ok(tally(&words)).trim().to_owned()
    };
    assert_eq!(counts("run by ./test races: a race on purpose"), "0 0 0");
    assert_eq!(counts("takes too long"), "0 0 1");
}

/// A state of two suites, and a list of skips that are known.
fn judged(known: &str, ci: bool) -> ringdisk_testkit::process::Finished {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    let here = "     Running tests/a.rs (target/debug/deps/a-0123456789abcdef)\n\
                test one ... ok\ntest two ... ok\ntest result: ok. 2 passed; 0 failed; 0 ignored\n";
    let there = "== a (uring)\ntest one ... ok\n\
                 @skip\twhole\ta-0123456789abcdef\ttwo\tmoon\n\
                 test two ... ok\ntest result: ok. 2 passed; 0 failed; 0 ignored\n";
    let skips = "whole\ta-0123456789abcdef\tone\tmoon\n";
    for (name, content) in [("here", here), ("there", there), ("skips", skips), ("known", known)] {
        std::fs::write(path(name), content).expect("a file");
    }
    let add = |suite: &str, log: &str, skips: &str| {
        let words = [Path::new("add"), &path("state"), Path::new(suite), &path(log), &path(skips)];
        ok(tally(&words))
    };
    assert_eq!(add("here", "here", "skips").trim(), "1 0 1");
    assert_eq!(add("there", "there", "none").trim(), "1 0 1");
    let mut end = tally(&[Path::new("end"), &path("state"), &path("known")]);
    if ci {
        end.env("CI", "1")
    } else {
        end.env_remove("CI")
    };
    run(&mut end)
}

const BOTH: &str = "# comment\nhere | moon | there | no moon here\nthere | m* | - | nor there\n";

#[test]
fn skips_are_listed_with_their_reasons() {
    let finished = judged("", false);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
    assert!(finished.stdout.contains("moon"), "{}", finished.output());
    assert!(finished.stdout.contains("a::one"), "{}", finished.output());
}

#[test]
fn with_ci_a_skip_that_nobody_knows_fails() {
    let finished = judged("here | moon | there | no moon here\n", true);
    assert_eq!(finished.code(), Some(1), "{}", finished.output());
    assert!(finished.stdout.contains("not in tests/known-skips"), "{}", finished.output());
    let finished = judged(BOTH, true);
    assert_eq!(finished.code(), Some(0), "{}", finished.output());
}

#[test]
fn with_ci_one_that_should_have_run_in_another_suite_fails() {
    // `two` is skipped there, and `one` is not: the other way round nothing covers it.
    let finished = judged("here | moon | - | x\nthere | moon | nowhere | y\n", true);
    assert_eq!(finished.code(), Some(0), "a suite that was not asked for: {}", finished.output());
    let known = "here | moon | there | x\nthere | moon | there | y\n";
    let finished = judged(known, true);
    assert_eq!(finished.code(), Some(1), "{}", finished.output());
    assert!(finished.stdout.contains("did not run in there either"), "{}", finished.output());
}

#[test]
fn a_list_that_cannot_be_read_fails() {
    let finished = judged("here | moon\n", false);
    assert_eq!(finished.code(), Some(2), "{}", finished.output());
    let finished = run(command(&["python3", "tests/tally"]).current_dir("../.."));
    assert_eq!(finished.code(), Some(2), "{}", finished.output());
}
