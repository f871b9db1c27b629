//! Files that answer at once; those that do not need a mount
//! (`crates/ringdisk/tests/machine/stopped.rs`).

use ringdisk_testkit::process::LIMIT;

use super::*;

#[test]
fn a_file_and_its_absence_are_answers() {
    let directory = tempfile::tempdir().expect("a directory");
    for path in [directory.path().to_owned(), directory.path().join("absent")] {
        let look = AnswerCheck::start(&path).expect("a process");
        assert!(look.is_answered(LIMIT), "{}", path.display());
    }
}

#[test]
fn the_answer_is_that_of_the_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let answer = |path: &Path| AnswerCheck::start(path).expect("a process").answer(LIMIT);
    assert_eq!(answer(directory.path()), Some(Ok(())));
    assert_eq!(answer(&directory.path().join("absent")), Some(Err(Errno::NOENT)));
}

#[test]
fn a_path_that_cannot_be_is_refused() {
    assert_eq!(AnswerCheck::start(Path::new("a\0b")).err(), Some(Errno::INVAL));
}
