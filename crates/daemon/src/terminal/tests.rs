use super::*;

#[test]
fn words_are_quoted_only_where_a_shell_needs_it() {
    assert_eq!(shell_word("/tmp/disk-1.raw"), "/tmp/disk-1.raw");
    assert_eq!(shell_word("my disk"), "'my disk'");
    assert_eq!(shell_word("it's"), r"'it'\''s'");
    assert_eq!(shell_word(""), "''");
}

#[test]
fn a_broken_pipe_is_the_end_and_a_full_disk_a_failure() {
    assert!(ended(Err(io::ErrorKind::BrokenPipe.into())).is_ok());
    let full = ended(Err(io::ErrorKind::StorageFull.into())).expect_err("full");
    assert_eq!(full.exit, Exit::General);
}

#[test]
fn colours_are_for_those_who_want_them() {
    let environment = |no_color: Option<&'static str>, term: Option<&'static str>| {
        move |name: &str| {
            let value = if name == "TERM" { term } else { no_color };
            value.map(OsString::from)
        }
    };
    assert!(colours_wanted(environment(None, Some("xterm"))));
    assert!(colours_wanted(environment(Some(""), None)));
    assert!(!colours_wanted(environment(Some("1"), Some("xterm"))));
    assert!(!colours_wanted(environment(None, Some("dumb"))));
}

#[test]
fn text_from_an_image_cannot_control_the_terminal() {
    assert_eq!(visible("a\x1b[31mb\n"), "a\\u{1b}[31mb\\n");
    assert_eq!(visible("größe"), "größe");
}
