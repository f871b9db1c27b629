use super::*;

const KNOWN: &[Known<char>] = &[
    Known { short: Some(b't'), long: "persistent", takes_value: false, id: 't' },
    Known { short: Some(b'e'), long: "shared", takes_value: true, id: 'e' },
    Known { short: Some(b'k'), long: "socket", takes_value: true, id: 'k' },
    Known { short: None, long: "fork", takes_value: false, id: 'f' },
];

fn apart(words: &[&str]) -> Result<Vec<Word<char>>, String> {
    Words::new(KNOWN, words.iter().map(OsString::from)).collect()
}

fn option(id: char, value: &str) -> Word<char> {
    Word::Option(id, Some(OsString::from(value)))
}

#[test]
fn values_are_in_the_same_word_or_in_the_next() {
    let all = [option('e', "2"), option('e', "3"), option('e', "4"), option('e', "5")];
    assert_eq!(apart(&["-e", "2", "-e3", "--shared", "4", "--shared=5"]).unwrap(), all);
    // As virtnbdbackup writes it: one word with a space in it.
    assert_eq!(apart(&["-e 2"]).unwrap(), [option('e', " 2")]);
    assert_eq!(apart(&["--shared="]).unwrap(), [option('e', "")]);
    // A value may look like an option.
    assert_eq!(apart(&["-e", "-t"]).unwrap(), [option('e', "-t")]);
}

#[test]
fn short_options_share_a_word_and_long_ones_may_be_shortened() {
    assert_eq!(apart(&["-te2"]).unwrap(), [Word::Option('t', None), option('e', "2")]);
    assert_eq!(apart(&["--pers", "--sh=2"]).unwrap(), [Word::Option('t', None), option('e', "2")]);
}

#[test]
fn operands_and_options_are_mixed_until_two_dashes() {
    let operand = |text: &str| Word::Operand(OsString::from(text));
    let all = [operand("a"), Word::Option('t', None), operand("-"), operand("-t"), operand("--")];
    assert_eq!(apart(&["a", "-t", "-", "--", "-t", "--"]).unwrap(), all);
}

#[test]
fn errors_have_the_texts_of_glibc() {
    for (words, text) in [
        (&["--foo"][..], "unrecognized option '--foo'"),
        (&["--foo=1"], "unrecognized option '--foo'"),
        (&["-Z"], "invalid option -- 'Z'"),
        (&["-tZ"], "invalid option -- 'Z'"),
        (&["-e"], "option requires an argument -- 'e'"),
        (&["--sha"], "option '--shared' requires an argument"),
        (&["--s", "2"], "option '--s' is ambiguous; possibilities: '--shared' '--socket'"),
        (&["--fork=1"], "option '--fork' doesn't allow an argument"),
    ] {
        assert_eq!(apart(words).unwrap_err(), text, "{words:?}");
    }
}

#[test]
fn names_that_are_no_text_are_operands() {
    let word = OsString::from_vec(vec![b'a', 0xff]);
    let mut words = Words::new(KNOWN, [word.clone()].into_iter());
    assert_eq!(words.next(), Some(Ok(Word::Operand(word))));
}
