//! SLURM's compressed lists: of nodes (`gnode[10,20-23],login1`), and of tasks on each node (`4(x2),3`).

/// Maximum length of a list in bytes; the node names of any cluster fit.
const MAX_BYTES: usize = 1 << 20;

/// Returns the first node of a list, with its zero padding: `gnode[08,11-13]` begins with `gnode08`. `None` if the list is
/// malformed.
pub fn first_node(list: &str) -> Option<String> {
    if list.len() > MAX_BYTES {
        return None;
    }
    let mut name = String::new();
    let mut rest = list;
    // Brackets may follow each other: `rack[1-2]node[03-04]`.
    while let Some(next) = rest.chars().next() {
        match next {
            ',' => break,
            '[' => {
                let (ranges, after) = rest[1..].split_once(']')?;
                name += first_number(ranges)?;
                rest = after;
            }
            c if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') => {
                name.push(c);
                rest = &rest[1..];
            }
            _ => return None,
        }
    }
    (!name.is_empty() && is_sound(rest)).then_some(name)
}

/// Returns the number of tasks on node `node`, counted from 0, of a list such as `4(x2),3`. `None` if the list is malformed or
/// has no such node.
pub fn tasks_on_node(list: &str, node: usize) -> Option<usize> {
    if list.len() > MAX_BYTES {
        return None;
    }
    let mut nodes = 0_usize;
    let mut found = None;
    for entry in list.split(',') {
        let (tasks, repeated) = match entry.split_once("(x") {
            Some((tasks, times)) => (tasks, number(times.strip_suffix(')')?)?),
            None => (entry, 1),
        };
        let tasks = number(tasks)?;
        nodes = nodes.checked_add(repeated)?;
        if nodes > node {
            found.get_or_insert(tasks);
        }
    }
    found
}

/// Returns the first number of `10,20-23`; `None` unless all of it consists of numbers and ascending ranges.
fn first_number(ranges: &str) -> Option<&str> {
    let mut first = None;
    for range in ranges.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        if number(low)? > number(high)? {
            return None;
        }
        first.get_or_insert(low);
    }
    first
}

/// Returns true if brackets match in the unused rest of a list.
fn is_sound(rest: &str) -> bool {
    let mut is_inside = false;
    rest.chars().all(|c| match c {
        '[' => !std::mem::replace(&mut is_inside, true),
        ']' => std::mem::replace(&mut is_inside, false),
        c => c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ','),
    }) && !is_inside
}

/// Parses digits only: `parse` would accept a sign.
fn number(text: &str) -> Option<usize> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lists_begin_with_their_first_node() {
        let table = [
            ("node1", "node1"),
            ("gnode[10,20-23]", "gnode10"),
            ("n[001-003],login1", "n001"),
            ("a,b[1-2]", "a"),
            ("rack[1-2]node[03-04]", "rack1node03"),
            ("x[7]-eth0.cluster.example", "x7-eth0.cluster.example"),
        ];
        for (list, first) in table {
            assert_eq!(first_node(list).as_deref(), Some(first), "{list}");
        }
        let broken = [
            "", ",", "[", "a[", "a]", "a[]", "a[1-]", "a[3-2]", "a[-1]", "a[+1]", "a[1],b[2", "a[1[2]]",
            "a b", "a,b[[1]]", "ä",
        ];
        for list in broken {
            assert_eq!(first_node(list), None, "{list:?}");
        }
    }

    #[test]
    fn tasks_are_counted_node_by_node() {
        let counts: Vec<Option<usize>> = (0..4).map(|node| tasks_on_node("4(x2),3", node)).collect();
        assert_eq!(counts, [Some(4), Some(4), Some(3), None]);
        assert_eq!(tasks_on_node("2(x18446744073709551615)", 1 << 40), Some(2));
        for list in ["", "4(x2", "4(2)", "x", "4,,3", "-4", "4(x-1)", "1(x18446744073709551615),2"] {
            assert_eq!(tasks_on_node(list, 1), None, "{list:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_list_or_is_not(text in "[a-c0-9\\[\\],x()-]{0,12}", node in 0_usize..5) {
            if let Some(name) = first_node(&text) {
                prop_assert!(!name.is_empty() && !name.contains(['[', ']', ',']));
            }
            let _ = tasks_on_node(&text, node);
        }

        #[test]
        fn a_list_that_was_written_is_read_back(tasks in proptest::collection::vec((1_usize..9, 1_usize..4), 1..5)) {
            let text: Vec<String> = tasks.iter().map(|(tasks, times)| format!("{tasks}(x{times})")).collect();
            let nodes: Vec<usize> = tasks.iter().flat_map(|(tasks, times)| vec![*tasks; *times]).collect();
            for (node, tasks) in nodes.iter().enumerate() {
                prop_assert_eq!(tasks_on_node(&text.join(","), node), Some(*tasks));
            }
            prop_assert_eq!(tasks_on_node(&text.join(","), nodes.len()), None);
        }
    }
}
