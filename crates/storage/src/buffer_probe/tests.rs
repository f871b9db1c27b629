//! Real files; the device that fails this trial is a RAM disk of Linux 7.3 (`tests/vm`).

use crate::{OpenOptions, Storage};

fn probed(content: &[u8], direct: bool) -> bool {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    std::fs::write(&path, content).unwrap();
    let options = OpenOptions { direct, ..OpenOptions::default() };
    Storage::open(&path, &options).unwrap().probe_client_pages()
}

fn telling(len: usize) -> Vec<u8> {
    (0..=250).cycle().take(len).collect()
}

#[test]
fn the_page_cache_takes_any_memory() {
    assert!(probed(b"", false));
}

#[test]
fn where_nothing_can_be_told_the_answer_is_no() {
    assert!(!probed(b"", true));
    assert!(!probed(&[0; 1 << 20], true));
    // Repeats itself at one of the distances that are tried.
    let repeats: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    assert!(!probed(&repeats, true));
}

#[test]
fn the_answer_for_a_file_is_remembered_and_changes_nothing_in_it() {
    let directory = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = directory.path().join("image");
    let content = telling(1 << 20);
    std::fs::write(&path, &content).unwrap();
    let options = OpenOptions { direct: true, ..OpenOptions::default() };
    let storage = Storage::open(&path, &options).unwrap();
    let first = storage.probe_client_pages();
    std::fs::write(&path, [0; 65536]).unwrap();
    assert_eq!(storage.probe_client_pages(), first);
    std::fs::write(&path, &content).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), content);
}
