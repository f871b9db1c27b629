use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

use serde_json::json;

use super::*;

fn found() -> Found {
    Found {
        path: PathBuf::from("/run/ringdisk/disk-1.sock"),
        owner: 0,
        connection: None,
        made: None,
    }
}

fn asked(answer: Answer) -> Asked {
    Asked { pid: Some(1), user: Some(0), answer }
}

fn described() -> Value {
    json!({
        "state": "serving", "why": null, "kind": "nbd", "where": "at 127.0.0.1:10809",
        "image": "/srv/a\u{1b}[2J.qcow2", "format": "qcow2", "size": 1_u64 << 30,
        "since": 1000, "read-only": true, "version": "0.1.0",
        "clients": [{ "pid": null, "address": "192.0.2.1:5000" }],
    })
}

#[test]
fn what_a_server_says_becomes_a_line_that_controls_no_terminal() {
    let entry = Entry::of_socket(&found(), &asked(Answer::Value(described())), None).expect("one");
    let now = UNIX_EPOCH + Duration::from_secs(1067);
    let text = text_table(std::slice::from_ref(&entry), now);
    let line = text.lines().nth(1).expect("a line");
    for part in ["root", "serving", "1m 7s", "1 GiB", "127.0.0.1:10809", "192.0.2.1:5000"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(line.contains("(qcow2) read-only") && !line.contains('\u{1b}'), "{line:?}");
    assert!(problems(&[entry]).is_empty());
}

#[test]
fn servers_that_lie_or_say_nothing_are_listed_all_the_same() {
    for answer in [json!(null), json!([]), json!({ "state": 7, "clients": "x", "size": -1 })] {
        let entry = Entry::of_socket(&found(), &asked(Answer::Value(answer)), None).expect("one");
        assert_eq!(entry.state.word(), "unknown");
    }
    let old = asked(Answer::Refused(String::from("no such command: 'describe'")));
    assert_eq!(Entry::of_socket(&found(), &old, None).expect("one").state, State::Serving);
    let silent = Entry::of_socket(&found(), &asked(Answer::Silent), None).expect("one");
    assert_eq!(silent.state, State::Silent);
    let foreign = Asked { user: Some(1000), ..asked(Answer::Value(described())) };
    let foreign = Entry::of_socket(&found(), &foreign, None).expect("one");
    assert!(foreign.image.is_empty() && foreign.state.word() == "foreign");
}

#[test]
fn what_is_left_comes_with_the_command_that_clears_it_away() {
    let stale = Entry::of_socket(&found(), &asked(Answer::Dead), None).expect("one");
    assert_eq!(stale.command.as_deref(), Some("rm /run/ringdisk/disk-1.sock"));
    let mount = MountEntry {
        id: 1,
        parent: 0,
        device: (0, 77),
        mountpoint: PathBuf::from("/srv/my disk"),
        options: String::new(),
        fstype: String::from("fuse.ringdisk"),
        source: "/srv/a.qcow2".into(),
        super_options: String::from("rw,user_id=1000"),
    };
    let dead = Entry::of_mount(&mount, true);
    assert_eq!(dead.command.as_deref(), Some("ringdisk umount '/srv/my disk'"));
    assert_eq!((dead.user, dead.state.word()), (Some(1000), "dead"));
    assert_eq!(problems(&[dead]).len(), 1);
}
