use super::*;

#[test]
fn what_was_overwritten_in_part_goes_too_and_links_stay() {
    let directory = tempfile::tempdir().expect("directory");
    let path = |name| directory.path().join(name);
    fs::write(path("old"), "content").expect("write");
    std::os::unix::fs::symlink("old", path("link")).expect("link");
    let fresh = NewFiles::default();
    assert!(!fresh.file(&path("link")).expect("there"));
    fresh.begin(&path("link")).expect("stat");
    fresh.undo();
    assert!(!path("old").exists() && path("link").is_symlink());
}

#[test]
fn a_file_with_content_stays_whoever_says_that_it_was_made() {
    let directory = tempfile::tempdir().expect("directory");
    for (name, content) in [("empty", ""), ("filled", "content")] {
        let path = directory.path().join(name);
        fs::write(&path, content).expect("write");
        let meta = fs::metadata(&path).expect("there");
        drop(NewFile::adopt(&path, (meta.dev(), meta.ino())));
        assert_eq!(path.exists(), !content.is_empty(), "{name}");
    }
}

#[test]
fn a_file_is_not_made_by_way_of_a_link_that_came_meanwhile() {
    let directory = tempfile::tempdir().expect("directory");
    let root = directory.path().canonicalize().expect("exists");
    fs::create_dir(root.join("elsewhere")).expect("a directory");
    std::os::unix::fs::symlink("elsewhere", root.join("folder")).expect("a link");
    let made = NewFile::make_there(&root.join("folder/new"), 0o600);
    assert_eq!(made.expect_err("a link").raw_os_error(), Some(40));
    assert_eq!(fs::read_dir(root.join("elsewhere")).expect("there").count(), 0);
    let made = NewFile::make_there(&root.join("elsewhere/new"), 0o600).expect("made");
    assert!(made.is_some() && root.join("elsewhere/new").exists());
    assert!(NewFile::make_there(&root.join("elsewhere/new"), 0o600).expect("fine").is_none());
}

#[test]
fn what_is_not_kept_goes_and_what_was_there_stays() {
    let directory = tempfile::tempdir().expect("directory");
    let path = |name| directory.path().join(name);
    fs::write(path("old"), "content").expect("write");
    let fresh = NewFiles::default();
    assert!(!fresh.file(&path("old")).expect("there"));
    assert!(fresh.file(&path("a")).expect("made"));
    fresh.keep();
    assert!(fresh.file(&path("b")).expect("made"));
    assert!(fresh.file(&path("c")).expect("made"));
    fs::rename(path("old"), path("c")).expect("rename");
    drop(fresh);
    assert!(path("a").exists() && !path("b").exists());
    assert_eq!(fs::read_to_string(path("c")).expect("another file"), "content");
}
