use std::collections::BTreeSet;
use std::fmt::Write;

use super::*;

/// The page that shows the lists, made of them.
fn page() -> String {
    let about = "What a process may do once it serves ([sandbox](sandbox.md)): made from \
                 `crates/sandbox/src/calls/list.rs` for x86_64 by the test that compares the two \
                 (`RINGDISK_WRITE_PAGES=1` writes this page). Arguments are counted from 1, and a \
                 filter sees integers only: of the memory behind a pointer it knows nothing. Every \
                 other call, and every other argument, is answered with `ENOSYS`.";
    let mut page = format!("# System calls of a serving process\n\n{}", filled(about, ""));
    let tables = [
        ("Every process", ALLOWED),
        ("`serve --connect`, where the helper process cannot connect", SOCKETS),
        ("`serve --accel`", VHOST),
        ("`serve --keep`", KEPT),
    ];
    for (title, needs) in tables {
        let _ = write!(page, "\n## {title}\n\n| call | with | for |\n|---|---|---|\n");
        needs.iter().for_each(|need| {
            let _ = writeln!(page, "{need}");
        });
    }
    page.push_str("\n## The end of the process\n\n");
    let mut groups: Vec<(&str, Vec<&str>)> = Vec::new();
    for need in DEADLY {
        match groups.last_mut() {
            Some((why, names)) if *why == need.why => names.push(need.name()),
            _ => groups.push((need.why, vec![need.name()])),
        }
    }
    for (why, names) in groups {
        page.push_str(&filled(&format!("- {why}: {}", names.join(", ")), "  "));
    }
    page
}

/// A paragraph in lines of at most 100 columns, all but the first of which are indented.
fn filled(text: &str, indent: &str) -> String {
    let (mut out, mut column) = (String::new(), 0);
    for word in text.split(' ') {
        if column > 0 && column + 1 + word.len() > 100 {
            let _ = write!(out, "\n{indent}");
            column = indent.len();
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += word.len();
    }
    out + "\n"
}

#[test]
#[cfg(target_arch = "x86_64")]
fn the_page_about_system_calls_shows_the_lists() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/system-calls.md");
    if std::env::var_os("RINGDISK_WRITE_PAGES").is_some() {
        std::fs::write(path, page()).expect("write");
    }
    let there = std::fs::read_to_string(path).expect("a page");
    assert!(there == page(), "write it anew: RINGDISK_WRITE_PAGES=1");
}

#[test]
fn each_call_has_one_row_and_a_reason() {
    for needs in [ALLOWED, SOCKETS, VHOST, KEPT, DEADLY] {
        let numbers: BTreeSet<i64> = needs.iter().map(|need| need.call).collect();
        assert_eq!(numbers.len(), needs.len());
        assert!(needs.iter().all(|need| !need.why.is_empty() && need.name() != need.constant));
        let sets = needs.iter().flat_map(|need| need.arguments);
        assert!(sets.clone().all(|set| !set.is_empty()), "a set without conditions allows all");
        assert!(sets.flat_map(|set| *set).all(|argument| argument.index < 6));
    }
    let all = Calls { sockets: true, vhost: true, kept: true, more: Vec::new() };
    let allowed: BTreeSet<i64> = all.needs().iter().map(|need| need.call).collect();
    assert!(all.deadly().iter().all(|need| !allowed.contains(&need.call)));
}

#[test]
fn arguments_are_judged_as_the_kernel_reads_them() {
    let judge = |is, value| Argument { index: 0, is }.allows(value, 77);
    assert!(judge(Is::In(&[1, 2]), (5 << 32) | 2) && !judge(Is::In(&[1, 2]), 3));
    assert!(judge(Is::Bits { mask: 6, value: 4 }, 5) && !judge(Is::Bits { mask: 6, value: 4 }, 6));
    assert!(judge(Is::Null, 0) && !judge(Is::Null, 1 << 32));
    assert!(judge(Is::OurPid, 77) && !judge(Is::OurPid, 0));
}
